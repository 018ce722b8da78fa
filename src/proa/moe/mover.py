"""Experts change places while the model goes on: copied beside the steps, switched between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.moe.gpu_experts import GpuExperts
from proa.moe.rebalance import Swap
from proa.native.ops import ExpertLayer

__all__ = ["ExpertMover", "ExpertPlaces"]


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Where one layer's experts are: each in exactly one of the two."""

    cpu: ExpertLayer
    gpu: GpuExperts


class ExpertMover:
    """One batch of swaps at a time. Each needs a free slot of the arena, and one of its layer's RAM, until it is done.

    `start` enqueues copies on a stream of their own; steps go on with the experts where they were. `poll`, between
    steps, switches all of them once the copies are done. A copy to memory that is not pinned waits for it.
    """

    __slots__ = ("_copies", "_done", "_layers", "_swaps")

    def __init__(self, layers: Sequence[ExpertPlaces], device: torch.device) -> None:
        self._layers = layers
        self._swaps: Sequence[Swap] = ()
        self._copies: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def busy(self) -> bool:
        """Swaps were started and not switched yet."""
        return bool(self._swaps)

    def start(self, swaps: Sequence[Swap]) -> None:
        """Begins to copy; not while busy.

        Raises:
            ConfigError: the arena has fewer free slots than there are swaps.
        """
        assert not self.busy, "one batch of swaps at a time"
        stream = 0
        if self._copies is not None:
            # Free slots may be those of experts that the steps so far still read.
            self._copies.wait_stream(torch.cuda.current_stream())
            stream = self._copies.cuda_stream
        for swap in swaps:
            coming, leaving = self._layers[swap.in_layer], self._layers[swap.out_layer]
            coming.gpu.begin(swap.in_expert, coming.cpu.blocks(swap.in_expert), stream)
            leaving.cpu.reserve(swap.out_expert)
            leaving.gpu.fetch(swap.out_expert, leaving.cpu.blocks(swap.out_expert), stream)
        if self._done is not None and self._copies is not None:
            self._done.record(self._copies)
        self._swaps = swaps

    def poll(self) -> Sequence[Swap]:
        """Between steps: the swaps that have just been switched, none while copies are on their way."""
        if not self.busy or (self._done is not None and not self._done.query()):  # type: ignore[no-untyped-call]
            return ()
        if self._copies is not None:
            # A step that drew nothing may still run, and its CPU jobs read experts that leave RAM here.
            torch.cuda.current_stream().synchronize()
        for swap in self._swaps:
            coming, leaving = self._layers[swap.in_layer], self._layers[swap.out_layer]
            coming.gpu.commit(swap.in_expert)
            leaving.cpu.commit(swap.out_expert)
            leaving.gpu.drop(swap.out_expert)
            coming.cpu.drop(swap.in_expert)
        switched, self._swaps = self._swaps, ()
        return switched
