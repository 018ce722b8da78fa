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


def test_without_flags_all_stay_on_the_cpu():
    placement = place_experts(config(), INFO)
    assert placement.num_gpu_experts == 0
    assert with_experts(GpuBytes(5, 7), placement, INFO, all_bytes=3200, max_tokens=10) == GpuBytes(5, 7)


def test_counts_are_per_layer_and_the_ratio_goes_first():
    assert place_experts(config(gpu_experts=2), INFO).num_gpu_experts == 8
    assert place_experts(config(gpu_experts=2, gpu_experts_ratio=0.5), INFO).num_gpu_experts == 16
    assert place_experts(config(gpu_experts=3, expert_placement="front-loading"), INFO).gpu_experts(0) == list(range(8))


def test_counts_of_routing_choose(tmp_path):
    counts = [[0] * 8 for _ in range(4)]
    counts[3] = list(range(8))
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts}))
    placement = place_experts(config(gpu_experts=1, expert_location=str(path)), INFO)
    assert placement.gpu_experts(3) == [4, 5, 6, 7]


def test_placed_experts_and_their_scratch_are_planned():
    placement = place_experts(config(gpu_experts=2), INFO)
    needed = with_experts(GpuBytes(5, 7), placement, INFO, all_bytes=3200, max_tokens=10)
    assert needed.weights == 5 + 3200 * 8 // 32
    assert needed.scratch == 7 + 2 * 20 * 96 + 2 * 10 * 64


def test_impossible_counts_are_refused():
    with pytest.raises(ConfigError, match="0 to 8 experts per layer"):
        place_experts(config(gpu_experts=9), INFO)
    with pytest.raises(ConfigError, match="routing counts"):
        place_experts(config(gpu_experts=1, expert_placement="frequency"), INFO)
