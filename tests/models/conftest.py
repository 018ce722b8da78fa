"""Fixtures of the model tests: one runtime, and tiny checkpoints built once per session."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from tests.kernels.fake_cuda import build_fake_driver
from tests.models.variants import Variant, build

from proa.device.gpu import GpuDevice
from proa.kernels import reference
from proa.layers.kernel_check import Activations
from proa.models import Model, load_model
from proa.native import _C
from proa.native.runtime import CpuRuntime
from proa.weights.checkpoint import Checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MAX_TOKENS = 64


def splits_activations(formats: Sequence[str] = ("bf16",)) -> bool:
    """Whether weights of one of these meet activations of two bf16 terms here (docs/decisions/0002-amx-cells.md)."""
    cells = [cell for name in formats for cell in _C.kernel_report(name, 64, 64)]
    return any(cell["chosen"] and cell["name"].startswith("amx.") for cell in cells)


@dataclass
class Case:
    """A checkpoint as proa loaded it, and the float32 transformers model of the same values."""

    variant: Variant
    path: Path
    model: Model
    reference: transformers.PreTrainedModel


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """The references are tiny: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def runtime() -> CpuRuntime:
    # One thread: on busy machines a join waits for whoever else has the core. Threads change no bit (see
    # test_batch_independence), only time.
    with CpuRuntime(1) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A CUDA driver whose memory is the host's."""
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def device(runtime):
    """What loads a trunk as on a GPU, in plain torch on the CPU."""
    return GpuDevice(runtime, torch.device("cpu"), reference, few_tokens=MAX_TOKENS)


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory, runtime: CpuRuntime) -> Callable[..., Case]:
    """`activations`: "trunk" gives experts the precision of other linears, which float oracles need."""
    built: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}
    made: dict[tuple[str, Activations], Case] = {}

    def make(variant: Variant, activations: Activations = "int8") -> Case:
        if variant.name not in built:
            path = tmp_path_factory.mktemp(variant.name)
            built[variant.name] = path, build(variant, path)
        key = variant.name, activations
        if key not in made:
            path, reference = built[variant.name]
            limits = {"max_tokens": MAX_TOKENS, "max_positions": 256}
            model = load_model(Checkpoint.open(path), runtime, expert_activations=activations, **limits)
            made[key] = Case(variant, path, model, reference)
        return made[key]

    return make
