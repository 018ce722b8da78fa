"""The Triton kernels of routed experts as an `ExpertCompute`."""

from __future__ import annotations

import torch

from proa.kernels.experts import ExpertFormat, ExpertScratch, grouped_experts
from proa.moe.router import TopK

__all__ = ["GroupedCompute"]


class GroupedCompute:
    """Of experts in `fmt`. `scratch`: of the largest forward, shared by layers of the same dimensions."""

    __slots__ = ("_fmt", "_scratch")

    def __init__(self, fmt: ExpertFormat, scratch: ExpertScratch) -> None:
        self._fmt = fmt
        self._scratch = scratch

    def __call__(
        self, x: torch.Tensor, topk: TopK, arena: torch.Tensor, table: torch.Tensor, out: torch.Tensor, accumulate: bool
    ) -> None:
        grouped_experts(x, topk.ids, topk.weights, arena, table, self._fmt, out, self._scratch, accumulate=accumulate)
