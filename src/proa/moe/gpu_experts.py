"""Routed experts in GPU memory: packed bytes as the CPU has them, in slots that all layers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from proa.core.errors import ConfigError
from proa.moe.router import TopK
from proa.native._C import CudaDriver

__all__ = ["ExpertArena", "ExpertCompute", "GpuExperts", "stream_handle"]


class ExpertCompute(Protocol):
    """The experts of a table on the GPU: `proa.kernels.experts.grouped_experts` with its format and scratch."""

    def __call__(
        self, x: torch.Tensor, topk: TopK, arena: torch.Tensor, table: torch.Tensor, out: torch.Tensor, accumulate: bool
    ) -> None:
        """`out` (`+=` with `accumulate`) the sum over slots of weight * expert(x), slots of other experts left out.

        arena: uint8; table: int64 `[E, 3]`, where in it gate, up and down of an expert begin, negative: elsewhere.
        """


def stream_handle(device: torch.device) -> int:
    """The CUDA stream that torch uses now, as `proa.native._C` takes it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class ExpertArena:
    """`num_slots` slots of one expert each, in one tensor that is allocated once."""

    __slots__ = ("_free", "data", "slot_bytes")

    def __init__(self, device: torch.device, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.data = torch.empty(slot_bytes * num_slots, dtype=torch.uint8, device=device)
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The byte where a free slot begins.

        Raises:
            ConfigError: there is none.
        """
        if not self._free:
            raise ConfigError("GPU experts", "a free slot", f"{self.data.numel() // self.slot_bytes} in use")
        return self._free.pop() * self.slot_bytes

    def give_back(self, start: int) -> None:
        """A slot that `take` gave."""
        self._free.append(start // self.slot_bytes)


class GpuExperts:
    """Which experts of one layer are on the GPU, and where.

    `table` int64 `[E, 3]` on the GPU (see `ExpertCompute`) stays the same tensor, so that captured graphs see experts
    come and go. `sizes`: bytes of gate, of up and of down. `movable`: experts may come after a graph was captured, even
    to a layer that had none.
    """

    __slots__ = ("_arena", "_compute", "_driver", "_movable", "_slots", "sizes", "table")

    def __init__(
        self,
        arena: ExpertArena,
        num_experts: int,
        sizes: tuple[int, int, int],
        compute: ExpertCompute,
        driver: CudaDriver,
        *,
        movable: bool = False,
    ) -> None:
        assert sum(sizes) <= arena.slot_bytes, "slots are as large as the largest expert"
        self._arena = arena
        self._compute = compute
        self._driver = driver
        self._movable = movable
        self._slots: dict[int, int] = {}
        self.sizes = sizes
        self.table = torch.full((num_experts, 3), -1, dtype=torch.int64, device=arena.data.device)

    @property
    def experts(self) -> list[int]:
        """In ascending order."""
        return sorted(self._slots)

    def begin(self, expert: int, blocks: Iterable[tuple[int, int]], stream: int) -> None:
        """Enqueues the copy of an expert from CPU memory into a slot; `commit` when nothing else is to be copied.

        `blocks`: `ExpertLayer.blocks`, pinned for the copy to run beside others.
        """
        start = self._arena.take()
        self._slots[expert] = start
        place = self._arena.data.data_ptr() + start
        for address, nbytes in blocks:
            self._driver.copy_to_device(stream, place, address, nbytes)
            place += nbytes

    def commit(self, expert: int) -> None:
        """From here on the expert is computed here; on the stream, after its copy."""
        gate, up, _ = self.sizes
        start = self._slots[expert]
        # Three fills and no tensor from the host: nothing to keep alive, nothing to wait for.
        for column, offset in enumerate((start, start + gate, start + gate + up)):
            self.table[expert, column].fill_(offset)

    def fetch(self, expert: int, blocks: Iterable[tuple[int, int]], stream: int) -> None:
        """Enqueues the copy of an expert back to CPU memory."""
        place = self._arena.data.data_ptr() + self._slots[expert]
        for address, nbytes in blocks:
            self._driver.copy_to_host(stream, address, place, nbytes)
            place += nbytes

    def drop(self, expert: int) -> None:
        """Not computed here any more. The slot may be overwritten by what is enqueued after this."""
        self.table[expert].fill_(-1)
        self._arena.give_back(self._slots.pop(expert))

    def forward(self, x: torch.Tensor, topk: TopK, out: torch.Tensor) -> None:
        """`x`, `out` float32 `[T, hidden]`; all of `out` is written."""
        if self._slots or self._movable:
            self._compute(x, topk, self._arena.data, self.table, out, accumulate=False)
        else:
            out.zero_()
