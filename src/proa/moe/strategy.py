"""Where the routed experts of a batch run.

A strategy belongs to one layer. Its forward has two halves, so that shared experts are computed on the device of the
trunk while routed experts run on the CPU:

    strategy.submit(x, topk, ctx)      starts; `ctx.out` holds what is done by then, or zeros
    shared experts                     added to `ctx.out`
    strategy.finish(x, topk, ctx)      waits; what was not in `ctx.out` yet is added to it

`x`, `topk` and `ctx.out` lie on the device of the trunk and stay untouched by others between the two calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from proa.moe.cpu_experts import CpuExperts
from proa.moe.router import TopK
from proa.moe.traffic import ExpertTraffic

__all__ = ["AllCpu", "ExpertStrategy", "LayerContext"]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What a strategy needs to know of its layer, and of the forward.

    defers: all layers of this forward have the same tokens, so that experts may come late where that was asked for.
    """

    layer: int
    out: torch.Tensor  # [T, hidden] float32, where the result goes
    defers: bool = False


class ExpertStrategy(Protocol):
    """One way to run the routed experts of a layer: `out` = sum over k of weight * expert(x)."""

    @property
    def traffic(self) -> ExpertTraffic:
        """Of the experts that run on the CPU."""

    @property
    def is_capturable(self) -> bool:
        """Whether a forward of few tokens only queues work on a stream, and so can be part of a CUDA graph."""

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        """`x` float32 `[T, hidden]`. Writes all of `ctx.out`."""

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        """The same tensors as in `submit`."""


class AllCpu:
    """Every expert on the CPU, as the trunk is."""

    __slots__ = ("_experts",)

    is_capturable = False

    def __init__(self, experts: CpuExperts) -> None:
        self._experts = experts

    @property
    def traffic(self) -> ExpertTraffic:
        return self._experts.traffic

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        self._experts.forward(x, topk, ctx.out)

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        """All was done by `submit`."""
