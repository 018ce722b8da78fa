"""Which routed experts go to the GPU, and what they take there."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from proa.engine.config import EngineConfig
from proa.models import ExpertInfo, ExpertPlan, GpuBytes
from proa.moe.hybrid_layers import PASS_ROWS, RING_PARTS
from proa.moe.placement import ExpertBudget, place
from proa.moe.stats import ExpertStats

__all__ = ["MAX_MOVES", "RAM_SLOTS", "expert_budget", "expert_count_asked", "place_experts", "with_experts"]

RING_SHARE = 8  # the ring takes at most this part of the GPU memory that the trunk leaves
# Experts that change places at a time: a slot each in GPU memory, and a copy in each direction beside a step.
MAX_MOVES = 16
# By so many experts a layer's share of the GPU may shrink: they have memory in RAM from the start.
RAM_SLOTS = 8
# In forwards of more tokens experts may cross the bus, before it is known who needs them. Of K2's 384, 32 tokens need
# half, and a split is no faster than the CPU alone (benchmarks/LOG.md, "prompts of few tokens").
FEW_TOKENS = 48


def expert_budget(config: EngineConfig, info: ExpertInfo) -> ExpertBudget | None:
    """What the flags ask for, at most all there are; None: as many as fit.

    Raises:
        ConfigError: a ratio outside 0 to 1.
    """
    if config.gpu_experts_ratio is not None:
        return ExpertBudget.ratio(info.layers, info.experts, config.gpu_experts_ratio)
    if config.gpu_experts is None:
        return None
    # A launch line written for another model or machine still starts; the table says what became of it.
    return ExpertBudget.per_layer(info.layers, info.experts, min(config.gpu_experts, info.experts))


def expert_count_asked(config: EngineConfig, layers: int, experts: int) -> int | None:
    """How many experts the flags ask for, of however many layers and experts there are; None: as many as fit."""
    if config.gpu_experts_ratio is not None:
        return int(config.gpu_experts_ratio * layers * experts)
    return None if config.gpu_experts is None else config.gpu_experts * layers


def place_experts(config: EngineConfig, info: ExpertInfo, count: int, *, all_bytes: int, left_bytes: int) -> ExpertPlan:
    """`count` experts on the GPU. `all_bytes`: of all routed experts; `left_bytes`: of GPU memory beside the trunk.

    Raises:
        ConfigError: routing counts that are missing, unreadable or of another model.
    """
    budget = ExpertBudget(info.layers, info.experts, count)
    stats = None if config.expert_location is None else _stats(config.expert_location)
    if stats is not None:
        stats = stats.of_moe_layers(info.layers, info.experts, info.dense_layers)
    plan = ExpertPlan(
        place(config.expert_placement, budget, stats).on_gpu,
        max_deferred=config.max_deferred_experts,
        shares=None if stats is None else stats.shares(info.top_k),
    )
    if config.expert_updates and 0 < count < budget.total:
        moves = min(MAX_MOVES, count, budget.total - count)
        plan = replace(plan, moves=moves, ram_slots=RAM_SLOTS)
    if config.gpu_prefill_threshold == 0 or plan.on_gpu.all():
        return plan
    expert = max(1, all_bytes // max(1, info.layers * info.experts))
    # A layer at most: what is ahead of that waits for nothing.
    part = min(expert * info.experts, left_bytes // RING_SHARE) // RING_PARTS // expert
    ring = RING_PARTS * max(1, part) * expert
    # Decode steps run between the layers of a pass of streamed experts, and stream none themselves.
    stream_from = max(config.gpu_prefill_threshold or FEW_TOKENS + 1, config.requests + 1)
    if config.chunked_prefill_size is not None and stream_from > config.chunked_prefill_size:
        return plan  # no pass has so many tokens
    stream_all = config.gpu_prefill_threshold is not None
    return replace(plan, stream_from=stream_from, ring_bytes=ring, stream_all=stream_all)


def _stats(location: str) -> ExpertStats:
    path = Path(location)
    return _read_stats(path, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=1)
def _read_stats(path: Path, mtime_ns: int) -> ExpertStats:  # noqa: ARG001  # another time is another file
    """Once for all the plans that are tried."""
    return ExpertStats.load(path)


def with_experts(needed: GpuBytes, plan: ExpertPlan, info: ExpertInfo, *, all_bytes: int, max_tokens: int) -> GpuBytes:
    """`needed` with the placed experts, of `all_bytes` in all, the ring, and scratch of a forward of `max_tokens`."""
    if not plan.uses_gpu:
        return replace(needed, scratch=needed.scratch + 4 * max_tokens * info.hidden)  # results on their way back
    pairs = max_tokens * info.top_k
    # Rows of pairs between gate, up and down, after down, and x, in bf16 (float32 where they are few).
    scratch = 2 * pairs * (info.hidden + info.intermediate) + 2 * max_tokens * info.hidden
    if plan.stream_from is not None:
        scratch += 4 * min(PASS_ROWS, max_tokens) * info.hidden  # what the CPU gets of a chunk at a time
    slots = int(plan.on_gpu.sum()) + plan.moves
    placed = all_bytes * slots // max(1, info.layers * info.experts)
    return replace(needed, weights=needed.weights + placed + plan.ring_bytes, scratch=needed.scratch + scratch)
