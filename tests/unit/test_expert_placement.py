"""What the engine's flags place on the GPU, and what it plans for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import expert_budget, place_experts, with_experts
from proa.models import ExpertInfo, GpuBytes

INFO = ExpertInfo(layers=4, experts=8, top_k=2, hidden=64, intermediate=32)


def config(**fields):
    return EngineConfig(model_path="m", to_engine="", from_engine="", **fields)


def placed(**fields):
    fields.setdefault("gpu_prefill_threshold", 0)
    budget = expert_budget(config(**fields), INFO)
    return place_experts(config(**fields), INFO, budget.gpu_experts if budget else 0, all_bytes=3200, left_bytes=4000)


def test_none_on_the_gpu_takes_nothing_there():
    plan = placed(gpu_experts=0)
    assert not plan.uses_gpu and plan.stream_from is None
    assert with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10) == GpuBytes(5, 7 + 4 * 10 * 64)


def test_counts_are_per_layer_and_the_ratio_goes_first():
    assert placed(gpu_experts=2).on_gpu.sum() == 8
    assert placed(gpu_experts=2, gpu_experts_ratio=0.5).on_gpu.sum() == 16
    assert placed(gpu_experts=3, expert_placement="front-loading").on_gpu[0].all()


def test_counts_of_routing_choose(tmp_path):
    counts = [[0] * 8 for _ in range(4)]
    counts[3] = list(range(8))
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts}))
    assert placed(gpu_experts=1, expert_location=str(path)).shares[3].sum() == pytest.approx(INFO.top_k)
    assert placed(gpu_experts=1, expert_location=str(path)).on_gpu[3].tolist() == [False] * 4 + [True] * 4


def test_counts_of_sglang_have_a_row_for_dense_layers(tmp_path):
    counts = torch.zeros(2, 5, 8, dtype=torch.int64)  # passes, layers of the model, experts
    counts[:, 4] = torch.arange(8)
    torch.save({"logical_count": counts}, tmp_path / "counts.pt")
    settings = config(gpu_experts=1, gpu_prefill_threshold=0, expert_location=str(tmp_path / "counts.pt"))
    info = replace(INFO, dense_layers=(0,))
    plan = place_experts(settings, info, 4, all_bytes=3200, left_bytes=4000)
    assert plan.on_gpu[3].tolist() == [False] * 4 + [True] * 4


def test_placed_experts_the_ring_and_scratch_are_planned():
    plan = placed(gpu_experts=2)
    needed = with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10)
    assert needed.weights == 5 + 3200 * 8 // 32
    assert needed.scratch == 7 + 2 * 20 * 96 + 2 * 10 * 64
    plan = placed(gpu_prefill_threshold=400)
    # An eighth of 4000: four parts of one expert of 100 bytes.
    assert (plan.stream_from, plan.ring_bytes) == (400, 400)
    assert with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10).weights == 5 + 400
    assert plan.stream_all
    assert placed(gpu_prefill_threshold=1).stream_from == 17
    assert placed(gpu_prefill_threshold=1, max_running_requests=1).stream_from == 2
    assert (
        place_experts(config(gpu_prefill_threshold=1), INFO, 0, all_bytes=32, left_bytes=4000).ring_bytes == 8
    )  # a layer


def test_experts_in_ram_may_stream_unless_told_not_to():
    plan = placed(gpu_prefill_threshold=None, gpu_experts=2)
    assert (plan.stream_from, plan.stream_all, plan.ring_bytes) == (49, False, 400)
    assert placed(gpu_prefill_threshold=None, cuda_graph_max_bs=200, max_running_requests=128).stream_from == 129
    assert placed(gpu_prefill_threshold=None, gpu_experts=8).stream_from is None
    assert placed(gpu_prefill_threshold=None, chunked_prefill_size=49).stream_from == 49
    assert not placed(gpu_prefill_threshold=None, chunked_prefill_size=48, gpu_experts=0).uses_gpu
    for threshold in (None, 0):
        scratch = with_experts(
            GpuBytes(5, 7), placed(gpu_prefill_threshold=threshold, gpu_experts=2), INFO, all_bytes=3200, max_tokens=10
        ).scratch
        assert scratch == 7 + 2 * 20 * 96 + 2 * 10 * 64 + (4 * 10 * 64 if threshold is None else 0)


def test_more_experts_than_there_are_means_all():
    assert placed(gpu_experts=200).on_gpu.all()
    assert expert_budget(config(), INFO) is None


def test_experts_that_move_have_slots_to_come_to():
    plan = placed(gpu_experts=2, expert_updates=True)
    assert (plan.moves, plan.ram_slots) == (8, 8)
    needed = with_experts(GpuBytes(5, 7), plan, INFO, all_bytes=3200, max_tokens=10)
    assert needed.weights == 5 + 3200 * 16 // 32
    for count in (0, 8):  # none or all on the GPU: nothing can move
        assert placed(gpu_experts=count, expert_updates=True).moves == 0


def test_missing_counts_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"logical_count": [[1] * 8]}))
    for policy in ("auto", "uniform"):
        with pytest.raises(ConfigError, match="counts of 4 x 8 experts"):
            placed(gpu_experts=1, expert_placement=policy, expert_location=str(path))
    with pytest.raises(ConfigError, match="routing counts"):
        placed(gpu_experts=1, expert_placement="frequency")
