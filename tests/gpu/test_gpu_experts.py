# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""Whole models with none, some and all routed experts on the GPU, launched and as CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.gpu.rounded_model import Comparison, Recording, load_plain
from tests.gpu.test_trunk import Replayed, on_gpu_only, trunk  # noqa: F401, fixtures
from tests.models.conftest import MAX_TOKENS, make_case, one_torch_thread, runtime  # noqa: F401, fixtures
from tests.models.paging import Pager
from tests.models.test_oracle import tokens
from tests.models.variants import VARIANTS

from proa.models import DecodeGraphs, ExpertPlan, inspect, load_model
from proa.moe.placement import ExpertBudget, place
from proa.weights.checkpoint import Checkpoint

NAMES = ("kimi_int4", "qwen3", "mixtral_tied")
OPTIONS = {"max_tokens": MAX_TOKENS, "max_positions": 256, "expert_activations": "bf16"}


def plan_of(path, share, stream_from=None, stream_all=True):
    info = inspect(Checkpoint.open(path)).experts
    placement = place("random", ExpertBudget.ratio(info.layers, info.experts, share))
    return ExpertPlan(placement.on_gpu, stream_from=stream_from, ring_bytes=1 << 16, stream_all=stream_all)


def load(path, runtime, trunk, plan):
    return load_model(Checkpoint.open(path), runtime, device=trunk, attention="triton", expert_plan=plan, **OPTIONS)


@on_gpu_only
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("share", "stream_from", "stream_all"),
    [(0.0, None, True), (0.4, None, True), (1.0, None, True)]
    + [(share, 20, stream_all) for share in (0.0, 0.4) for stream_all in (True, False)],
)
def test_every_row_is_that_of_plain_torch_which_rounds_alike(
    name, share, stream_from, stream_all, make_case, runtime, trunk, device, monkeypatch
):
    """A prompt of a few and one of many tokens, then single tokens."""
    case = make_case(next(v for v in VARIANTS if v.name == name))
    plan, recording = plan_of(case.path, share, stream_from, stream_all), Recording()
    with monkeypatch.context() as patch:
        recording.watch(patch)
        model = load(case.path, runtime, trunk, plan)

    def on_gpu(layer, tokens):
        if not recording.plans:
            return plan.on_gpu[layer]
        here = np.ones(plan.on_gpu.shape[1], np.bool_)
        here[list(recording.plans[-1][layer].cpu)] = False
        return here

    plain = [load_plain(case, runtime, device, on_gpu, rounds=rounds, **OPTIONS) for rounds in (True, False)]
    pages = [Pager(m, num_blocks=16, device=device) for m in (model, *(reference.model for reference in plain))]
    comparison = Comparison(case, tokens(40), recording, pages, *plain)
    one = [torch.tensor([token], dtype=torch.int32) for token in (3, 14)]
    for chunks in ([tokens(3, 3)], [tokens(37, 40)], one, one):
        comparison.check(chunks)
        assert len(recording.plans) == (stream_from is not None and len(chunks[0]) >= stream_from)


@on_gpu_only
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_replays_have_the_bits_of_launches(share, make_case, runtime, trunk, device):
    path = make_case(next(v for v in VARIANTS if v.name == "kimi_int4")).path
    model = load(path, runtime, trunk, plan_of(path, share))
    pages = [Pager(model, num_blocks=32, dtype="bfloat16", device=device) for _ in range(2)]
    with torch.inference_mode():
        graphs = DecodeGraphs(model, pages[1].kv, max_batch=3, max_blocks=16)
        pages[1].model = Replayed(model, graphs)
        sequences = [[p.sequence(64) for _ in range(3)] for p in pages]
        for step in range(20):
            chunks = [tokens(4 if step == 0 else 1, seed) for seed in range(3 if step % 2 == 0 else 2)]
            found = [
                p.forward(list(zip(s[: len(chunks)], chunks, strict=True)))
                for p, s in zip(pages, sequences, strict=True)
            ]
            assert torch.equal(*found)
    assert pages[1].model.replayed == 19
