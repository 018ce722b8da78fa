"""Experts that follow the routing: what is used most goes to the GPU, while the model answers.

Between steps, and only there: the counts of the routers are taken, swaps are proposed from their moving average, copies
start on a stream of their own, and what has been copied is switched. A step finds every expert in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from proa.moe.mover import ExpertMover, ExpertPlaces
from proa.moe.placement import Placement
from proa.moe.rebalance import RebalanceSpec, Swap, apply_swaps, propose_swaps
from proa.moe.stats import MovingAverage

__all__ = ["ExpertUpdates", "UpdateSpec"]


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """`interval`: tokens of a layer between two proposals. `half_life`: of the average, in tokens. `expected`: tokens
    that an even use counts for at first; a use that is known counts for a half-life.

    A proposal costs the GPU's counts once over the bus and a sort of all experts; a batch of swaps, `max_swaps` copies
    in each direction beside the steps.
    """

    interval: int = 16
    half_life: float = 256.0
    expected: float = 64.0
    rebalance: RebalanceSpec = field(default_factory=RebalanceSpec)


class ExpertUpdates:
    """Of all MoE layers of a model. Told what was routed and polled when no step is on its way."""

    __slots__ = ("_average", "_layers", "_mover", "_proposed", "_spec", "num_moved", "placement")

    def __init__(
        self,
        layers: Sequence[ExpertPlaces],
        placement: Placement,
        top_k: int,
        device: torch.device,
        spec: UpdateSpec | None = None,
        *,
        shares: np.ndarray | None = None,
    ) -> None:
        """`placement`: where the experts of `layers` are now; the arena has `spec.rebalance.max_swaps` free slots.

        `shares` `[layers, experts]`: the use that is expected (`ExpertStats.shares`); None: even.
        """
        self._layers = layers
        self._spec = spec or UpdateSpec()
        self._mover = ExpertMover(layers, device)
        num_layers, num_experts = placement.on_gpu.shape
        self._average = MovingAverage(num_layers, num_experts, top_k, self._spec.half_life)
        if shares is None:
            even = np.full((num_layers, num_experts), top_k / num_experts)
            self._average.expect(even, self._spec.expected)
        else:
            self._average.expect(shares, self._spec.half_life)
        self._proposed = 0
        self.placement = placement
        self.num_moved = 0

    def wants_counts(self, tokens: int) -> bool:
        """Whether to propose swaps after so many tokens since the last time; sooner while there is much to move."""
        return not self._mover.busy and (
            tokens >= self._spec.interval or self._proposed == self._spec.rebalance.max_swaps
        )

    def add(self, counts: np.ndarray) -> None:
        """`counts` `[layers, experts]`: `RoutingCounts.take`. Begins the swaps that follow from them."""
        self._average.add(counts)
        if self._mover.busy:
            return
        spare = np.array([layer.cpu.spare_slots for layer in self._layers])
        swaps = propose_swaps(self.placement, self._average.shares, self._spec.rebalance, ram_slots=spare)
        self._proposed = len(swaps)
        if swaps:
            self._mover.start(swaps)

    def poll(self) -> Sequence[Swap]:
        """Switches what has been copied; the swaps that were."""
        switched = list(self._mover.poll())
        if switched:
            self.placement = apply_swaps(self.placement, switched)
            self.num_moved += len(switched)
        return switched
