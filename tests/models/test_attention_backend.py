"""The list of attention backends, and the CPU one over several pools."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from tests.models.paging import Pager, all_logits
from tests.models.test_batch_independence import in_one_forward, prompt
from tests.models.variants import VARIANTS

from proa.attention.backend import create_attention, gpu_backend
from proa.attention.shape import HeadShape
from proa.core.errors import ConfigError
from proa.device.cpu import CpuDevice
from proa.device.gpu import GpuDevice
from proa.kernels import reference
from proa.models.decoder import Decoder


def test_unknown_backend_names_the_known_ones(runtime):
    with pytest.raises(ConfigError, match=r"\['cpu', 'torch', 'triton'\], got fast"):
        create_attention("fast", CpuDevice(runtime), HeadShape(4, 16))


@pytest.mark.parametrize(
    ("asked", "has_triton", "backend", "said"),
    [
        ("auto", True, "triton", "Triton kernels"),
        ("triton", True, "triton", "Triton kernels"),
        ("flashinfer", True, "triton", "instead of flashinfer"),
        ("torch", True, "torch", "slow"),
        ("torch", False, "torch", "slow"),
        ("auto", False, "torch", "triton is not installed"),
        ("flashinfer", False, "torch", "instead of flashinfer, slow: the package triton is not installed"),
    ],
)
def test_what_runs_on_a_gpu_is_said(monkeypatch, asked, has_triton, backend, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if has_triton else None)
    name, text = gpu_backend(asked)
    assert name == backend and said in text


@pytest.mark.parametrize(("attention", "experts"), [(True, True), (False, True), (True, False)])
def test_steps_are_captured_where_attention_and_experts_allow_it(attention, experts):
    layers = [SimpleNamespace(is_capturable=True), SimpleNamespace(is_capturable=experts)]
    workspace = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cuda")))
    parts = SimpleNamespace(_workspace=workspace, _layers=layers, _backend=SimpleNamespace(is_capturable=attention))
    assert Decoder.is_capturable.fget(parts) == (attention and experts)


def test_plain_torch_waits_for_the_device_and_cannot_be_captured(runtime):
    device = GpuDevice(runtime, torch.device("cpu"), reference)
    assert not create_attention("torch", device, HeadShape(4, 16)).is_capturable


def test_one_model_serves_two_pools_in_turn(make_case):
    """The backend keeps views of the pool it saw last: they must follow the pool."""
    model = make_case(VARIANTS[0]).model
    pagers = [Pager(model, num_blocks=8), Pager(model, num_blocks=8)]
    sequences = [pager.sequence(40) for pager in pagers]
    for first, second in zip(prompt(1).split(8), prompt(2).split(8), strict=True):
        pagers[0].forward([(sequences[0], first)])
        pagers[1].forward([(sequences[1], second)])
    for seed, sequence in enumerate(sequences, start=1):
        assert torch.equal(all_logits(sequence), in_one_forward(model, prompt(seed)))
