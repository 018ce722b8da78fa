"""Expert deferral (KTransformers, SOSP 2025): the least weighty CPU experts of a token come one layer late.

While the GPU computes the next layer's attention, the CPU goes on with them. That changes what the model computes, so
it is off unless asked for, and which slots are late is fixed before a forward: a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.core.errors import ConfigError
from proa.moe.router import TopK

__all__ = ["DeferralPlan", "split_slots"]


@dataclass(frozen=True, slots=True)
class DeferralPlan:
    """`deferred[i]`: how many slots of a token may come late in MoE layer i, counted from 0; the last has none."""

    deferred: tuple[int, ...]

    @classmethod
    def create(cls, num_layers: int, top_k: int, max_deferred: int) -> DeferralPlan:
        """`--kt-max-deferred-experts-per-token`.

        Raises:
            ConfigError: fewer than 0, or all slots of a token.
        """
        if not 0 <= max_deferred < top_k:
            raise ConfigError("--kt-max-deferred-experts-per-token", f"0 to {top_k - 1}", max_deferred)
        return cls((max_deferred,) * (num_layers - 1) + (0,) if num_layers else ())


def split_slots(topk: TopK, count: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 `[T, k]` (now, late): the `count` slots of least weight come late unless their expert is on the GPU.

    Of equal weights the later slot is late. -1 where a slot is not in that half. `table`: `GpuExperts.table`.
    """
    order = torch.argsort(topk.weights, dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    on_cpu = table[topk.ids.clamp(min=0).long(), 0] < 0
    is_late = (rank >= topk.ids.shape[1] - count) & on_cpu
    return topk.ids.masked_fill(is_late, -1), topk.ids.masked_fill(~is_late, -1)
