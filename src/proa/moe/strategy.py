"""Where the routed experts of a batch run."""

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
    """What a strategy needs to know of its layer."""

    layer: int
    out: torch.Tensor  # [T, hidden] float32, where the result goes


class ExpertStrategy(Protocol):
    """One way to run the routed experts of a layer."""

    @property
    def traffic(self) -> ExpertTraffic:
        """Of the experts that run on the CPU."""

    def forward(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> torch.Tensor:
        """`x` float32 `[T, hidden]` -> sum over k of weight * expert(x), written to and returned as `ctx.out`."""


class AllCpu:
    """Every expert on the CPU."""

    __slots__ = ("_experts",)

    def __init__(self, experts: CpuExperts) -> None:
        self._experts = experts

    @property
    def traffic(self) -> ExpertTraffic:
        return self._experts.traffic

    def forward(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> torch.Tensor:
        self._experts.forward(x, topk, ctx.out)
        return ctx.out
