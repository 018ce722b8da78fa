"""The Triton kernels of routed experts as an `ExpertCompute`, and their self-test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from proa.kernels import reference
from proa.kernels.experts import ExpertFormat, ExpertScratch, grouped_experts
from proa.layers.gpu_check import raise_fault
from proa.layers.known_data import known_activations, known_values, known_weight
from proa.moe.router import TopK
from proa.native._C import PackedWeight, ThreadPool

__all__ = ["GroupedCompute", "check_grouped"]

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 256, 128, 3, 2
# One token, and enough for each number of rows that the products on tensor cores are built for.
TOKENS = (1, 20, 40, 80, 200)
# Relative L2 error: weights, activations and what the products hand over are rounded to bf16, 2^-9 each and of random
# sign; twice the sum of all.
TOLERANCE = 2.0**-6


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


def check_grouped(pool: ThreadPool, fmt: ExpertFormat, device: torch.device) -> None:
    """Small experts of fixed values in the formats of `fmt`, one of which is elsewhere.

    Raises:
        KernelFaultError: the sums are not what they should be.
    """
    fmt = replace(fmt, hidden=HIDDEN, intermediate=INTERMEDIATE)
    parts, values, table, end = [], [], [], 0
    for expert in range(NUM_EXPERTS):
        raws = [known_weight(fmt.gate_up, INTERMEDIATE, HIDDEN, 3 * expert + i) for i in range(2)]
        raws.append(known_weight(fmt.down, HIDDEN, INTERMEDIATE, 3 * expert + 2))
        packed = [PackedWeight.pack(pool, raw) for raw in raws]
        values.append([torch.from_numpy(known_values(*both)) for both in zip(raws, packed, strict=True)])
        begins = []
        for weight in packed:
            begins.append(end)
            parts.append(weight.packed)
            end += len(weight.packed)
        table.append([-1, -1, -1] if expert == NUM_EXPERTS - 1 else begins)
    arena, places = torch.from_numpy(np.concatenate(parts)).to(device), torch.tensor(table, device=device)
    scratch = ExpertScratch(max(TOKENS), TOP_K, NUM_EXPERTS, fmt, device)
    x = torch.from_numpy(known_activations(max(TOKENS), HIDDEN)) / 64
    ids = (torch.arange(len(x))[:, None] + torch.arange(TOP_K)).int() % NUM_EXPERTS
    weights = torch.tensor([0.75, 0.25]).repeat(len(x), 1)
    expected = _expected(x, ids, weights, values[:-1], fmt)
    for tokens in TOKENS:
        found = torch.full((tokens, HIDDEN), torch.nan, device=device)
        part, chosen, shares = (rows[:tokens].to(device) for rows in (x, ids, weights))
        grouped_experts(part, chosen, shares, arena, places, fmt, found, scratch)
        error = float((found.cpu() - expected[:tokens]).norm() / expected[:tokens].norm())
        fault = "" if error <= TOLERANCE else f"a relative error of {error:.3g} for {tokens} tokens"
        raise_fault(f"experts of {fmt.gate_up} and {fmt.down}", fault)


def _expected(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, values: list[list[torch.Tensor]], fmt: ExpertFormat
) -> torch.Tensor:
    """float64, of the experts in `values`."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert, (gate, up, down) in enumerate(values):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = torch.empty(len(token), INTERMEDIATE, dtype=torch.float64)
        joined = x[token].double() @ torch.cat([gate, up]).T
        reference.gated_product(joined, hidden, gating=fmt.gating, limit=fmt.limit, alpha=fmt.alpha)
        out.index_add_(0, token, weights[token, slot, None] * (hidden @ down.T))
    return out
