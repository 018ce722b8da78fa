"""Which routed experts go to the GPU, and what they take there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from proa.engine.config import EngineConfig
from proa.models import ExpertInfo, ExpertPlan, GpuBytes
from proa.moe.placement import ExpertBudget, place
from proa.moe.stats import ExpertStats

__all__ = ["place_experts", "with_experts"]

RING_SHARE = 8  # the ring takes at most this part of the GPU's memory


def place_experts(config: EngineConfig, info: ExpertInfo, *, all_bytes: int, gpu_bytes: int) -> ExpertPlan:
    """What the flags ask for. `all_bytes`: of all routed experts; `gpu_bytes`: of the GPU's memory.

    Raises:
        ConfigError: more experts than there are, or counts that are missing, unreadable or of another model.
    """
    if config.gpu_experts_ratio is not None:
        budget = ExpertBudget.ratio(info.layers, info.experts, config.gpu_experts_ratio)
    else:
        budget = ExpertBudget.per_layer(info.layers, info.experts, config.gpu_experts or 0)
    stats = None if config.expert_location is None else ExpertStats.load(Path(config.expert_location))
    on_gpu = place(config.expert_placement, budget, stats).on_gpu
    if config.gpu_prefill_threshold is None:
        return ExpertPlan(on_gpu)
    # A layer at most: what is ahead of that waits for nothing.
    ring = min(all_bytes // max(1, info.layers), gpu_bytes // RING_SHARE)
    # A pass of streamed experts cannot be part of a graph.
    captured = 0 if config.disable_cuda_graph else min(config.cuda_graph_max_bs, config.max_running_requests)
    return ExpertPlan(on_gpu, max(config.gpu_prefill_threshold, captured + 1), ring)


def with_experts(needed: GpuBytes, plan: ExpertPlan, info: ExpertInfo, *, all_bytes: int, max_tokens: int) -> GpuBytes:
    """`needed` with the placed experts, of `all_bytes` in all, the ring, and scratch of a forward of `max_tokens`."""
    if not plan.uses_gpu:
        return needed
    pairs = max_tokens * info.top_k
    # Rows of pairs between gate, up and down, after down, and x, in bf16 (float32 where they are few).
    scratch = 2 * pairs * (info.hidden + info.intermediate) + 2 * max_tokens * info.hidden
    placed = all_bytes * int(plan.on_gpu.sum()) // max(1, info.layers * info.experts)
    return replace(needed, weights=needed.weights + placed + plan.ring_bytes, scratch=needed.scratch + scratch)
