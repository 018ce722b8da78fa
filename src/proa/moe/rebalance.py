"""Which experts change places as routing drifts. Pure: proposes moves, moves nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proa.moe.placement import Placement

__all__ = ["RebalanceSpec", "Swap", "apply_swaps", "propose_swaps"]


@dataclass(frozen=True, slots=True)
class RebalanceSpec:
    """When a swap is worth its two copies.

    `margin`: the expert that comes in is used by this factor more than the one that goes, and `floor` tokens per
    token more. Together they keep two experts of about the same use from changing places for ever. `max_swaps`: at
    a time, since a swap takes the PCIe bus from the step it runs beside.
    """

    margin: float = 0.25
    floor: float = 0.002
    max_swaps: int = 16


@dataclass(frozen=True, slots=True)
class Swap:
    """`in_expert` of `in_layer` goes to the GPU, `out_expert` of `out_layer` to RAM: the layers' budgets may change."""

    in_layer: int
    in_expert: int
    out_layer: int
    out_expert: int


def propose_swaps(
    placement: Placement, shares: np.ndarray, spec: RebalanceSpec, *, ram_slots: np.ndarray | None = None
) -> list[Swap]:
    """The most used experts in RAM against the least used ones on the GPU, of all layers, best gain first.

    `shares` `[layers, experts]`: tokens per token (`MovingAverage.shares`). `ram_slots` int `[layers]`: how many
    experts of a layer may come to RAM before others leave it; None: any number. The same for the same arguments.
    """
    num_experts = shares.shape[1]
    flat, on_gpu = shares.reshape(-1), placement.on_gpu.reshape(-1)
    inside, outside = np.flatnonzero(on_gpu), np.flatnonzero(~on_gpu)
    leaving = _leaving(inside[np.argsort(flat[inside], kind="stable")], num_experts, ram_slots)[: spec.max_swaps]
    coming = outside[np.argsort(-flat[outside], kind="stable")][: spec.max_swaps]
    swaps = []
    for new, old in zip(coming, leaving, strict=False):
        if flat[new] <= flat[old] * (1.0 + spec.margin) + spec.floor:
            break  # later pairs gain less
        swaps.append(Swap(*divmod(int(new), num_experts), *divmod(int(old), num_experts)))
    return swaps


def _leaving(order: np.ndarray, num_experts: int, ram_slots: np.ndarray | None) -> np.ndarray:
    """Those of the flat positions `order` for which their layer has a slot in RAM, the first ones first."""
    if ram_slots is None or not order.size:
        return order
    layers = order // num_experts
    # How many of the same layer come before each.
    by_layer = np.argsort(layers, kind="stable")
    starts = np.searchsorted(layers[by_layer], layers[by_layer])
    before = np.empty_like(order)
    before[by_layer] = np.arange(order.size) - starts
    kept: np.ndarray = order[before < ram_slots[layers]]
    return kept


def apply_swaps(placement: Placement, swaps: list[Swap]) -> Placement:
    """The placement after `swaps`, which `propose_swaps` made for it."""
    on_gpu = placement.on_gpu.copy()
    for swap in swaps:
        on_gpu[swap.in_layer, swap.in_expert] = True
        on_gpu[swap.out_layer, swap.out_expert] = False
    return Placement(on_gpu)
