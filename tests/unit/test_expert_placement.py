"""What the engine's flags place on the GPU, and what it plans for it."""

from __future__ import annotations

import json

import pytest

from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import place_experts, with_experts
from proa.models import ExpertInfo, GpuBytes

INFO = ExpertInfo(layers=4, experts=8, top_k=2, hidden=64, intermediate=32)


def config(**fields):
    return EngineConfig(model_path="m", to_engine="", from_engine="", **fields)


def placed(**fields):
    return place_experts(config(**fields), INFO, all_bytes=3200, gpu_bytes=4000)


def test_without_flags_all_stay_on_the_cpu():
    plan = placed()
    assert not plan.uses_gpu and plan.stream_from is None
    assert with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10) == GpuBytes(5, 7)


def test_counts_are_per_layer_and_the_ratio_goes_first():
    assert placed(gpu_experts=2).on_gpu.sum() == 8
    assert placed(gpu_experts=2, gpu_experts_ratio=0.5).on_gpu.sum() == 16
    assert placed(gpu_experts=3, expert_placement="front-loading").on_gpu[0].all()


def test_counts_of_routing_choose(tmp_path):
    counts = [[0] * 8 for _ in range(4)]
    counts[3] = list(range(8))
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts}))
    assert placed(gpu_experts=1, expert_location=str(path)).on_gpu[3].tolist() == [False] * 4 + [True] * 4


def test_placed_experts_the_ring_and_scratch_are_planned():
    plan = placed(gpu_experts=2)
    needed = with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10)
    assert needed.weights == 5 + 3200 * 8 // 32
    assert needed.scratch == 7 + 2 * 20 * 96 + 2 * 10 * 64
    plan = placed(gpu_prefill_threshold=400)
    assert (plan.stream_from, plan.ring_bytes) == (400, 4000 // 8)
    assert with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10).weights == 5 + 500
    assert placed(gpu_prefill_threshold=1).stream_from == 17
    assert placed(gpu_prefill_threshold=1, disable_cuda_graph=True).stream_from == 1
    assert place_experts(config(gpu_prefill_threshold=1), INFO, all_bytes=32, gpu_bytes=4000).ring_bytes == 8


def test_impossible_counts_are_refused():
    with pytest.raises(ConfigError, match="0 to 8 experts per layer"):
        placed(gpu_experts=9)
    with pytest.raises(ConfigError, match="routing counts"):
        placed(gpu_experts=1, expert_placement="frequency")
