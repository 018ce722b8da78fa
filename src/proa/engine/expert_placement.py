"""Which routed experts go to the GPU, and what they take there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from proa.engine.config import EngineConfig
from proa.models import ExpertInfo, GpuBytes
from proa.moe.placement import ExpertBudget, Placement, place
from proa.moe.stats import ExpertStats

__all__ = ["place_experts", "with_experts"]


def place_experts(config: EngineConfig, info: ExpertInfo) -> Placement:
    """What the flags ask for.

    Raises:
        ConfigError: more experts than there are, or counts that are missing, unreadable or of another model.
    """
    if config.gpu_experts_ratio is not None:
        budget = ExpertBudget.ratio(info.layers, info.experts, config.gpu_experts_ratio)
    else:
        budget = ExpertBudget.per_layer(info.layers, info.experts, config.gpu_experts or 0)
    stats = None if config.expert_location is None else ExpertStats.load(Path(config.expert_location))
    return place(config.expert_placement, budget, stats)


def with_experts(
    needed: GpuBytes, placement: Placement, info: ExpertInfo, *, all_bytes: int, max_tokens: int
) -> GpuBytes:
    """`needed` with the placed experts, of `all_bytes` in all, and the scratch of a forward of `max_tokens`."""
    count = placement.num_gpu_experts
    if count == 0:
        return needed
    pairs = max_tokens * info.top_k
    # Rows of pairs between gate, up and down, after down, and x, in bf16 (float32 where they are few).
    scratch = 2 * pairs * (info.hidden + info.intermediate) + 2 * max_tokens * info.hidden
    return replace(
        needed,
        weights=needed.weights + all_bytes * count // max(1, info.layers * info.experts),
        scratch=needed.scratch + scratch,
    )
