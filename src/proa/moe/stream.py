"""Experts that cross the bus while others are computed: a ring in GPU memory, filled ahead of its use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.native._C import CudaDriver
from proa.native.ops import ExpertLayer

__all__ = ["StreamGroup", "SuspendedStream", "WeightStream", "make_groups"]


@dataclass(frozen=True, slots=True)
class StreamGroup:
    """Experts of one layer that fill one part of the ring.

    `copies`: (address in pinned CPU memory, byte in the part, bytes), as few as adjacent memory allows. `experts` with
    the byte in the part where each begins.
    """

    layer: int
    experts: tuple[int, ...]
    starts: tuple[int, ...]
    copies: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.copies)


def make_groups(layer: int, source: ExpertLayer, experts: Sequence[int], part_experts: int) -> list[StreamGroup]:
    """`experts` of `source`, which has them in memory, in groups of up to `part_experts`, in the order of addresses."""
    ordered = sorted(experts, key=lambda expert: source.blocks(expert)[0])
    groups = []
    for first in range(0, len(ordered), part_experts):
        chosen = tuple(ordered[first : first + part_experts])
        copies: list[tuple[int, int, int]] = []
        starts, place = [], 0
        for expert in chosen:
            starts.append(place)
            for address, nbytes in source.blocks(expert):
                if copies and copies[-1][0] + copies[-1][2] == address:
                    copies[-1] = (copies[-1][0], copies[-1][1], copies[-1][2] + nbytes)
                else:
                    copies.append((address, place, nbytes))
                place += nbytes
        groups.append(StreamGroup(layer, chosen, tuple(starts), tuple(copies)))
    return groups


@dataclass(frozen=True, slots=True)
class SuspendedStream:
    """A pass that stands before group `next`."""

    groups: Sequence[StreamGroup]
    tables: torch.Tensor
    next: int


class WeightStream:
    """The groups of a pass, in order: copied into the parts of a ring as these come free, on a stream of their own.

    The computing stream takes each group with `wait`, enqueues its work, and says `release`. Nothing waits on the CPU.
    """

    __slots__ = (
        "_copied",
        "_copies",
        "_driver",
        "_groups",
        "_next",
        "_pass_bytes",
        "_tables",
        "_timing",
        "_total",
        "_used",
        "arena",
        "copies_enabled",
        "num_parts",
        "part_bytes",
    )

    def __init__(self, device: torch.device, driver: CudaDriver, part_bytes: int, num_parts: int = 2) -> None:
        """`part_bytes`: a multiple of 64. Allocates `part_bytes * num_parts` bytes on the device."""
        assert part_bytes % 64 == 0, "the kernels read from multiples of 64"
        self._driver = driver
        self.copies_enabled = True  # off to time what is computed alone
        self.part_bytes = part_bytes
        self.num_parts = num_parts
        self.arena = torch.empty(part_bytes * num_parts, dtype=torch.uint8, device=device)
        self._copies: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied, self._used = (
                [torch.cuda.Event() for _ in range(num_parts)]  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
        # Around the copies of a pass; counted once they are over. One given up is not.
        self._timing: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._pass_bytes = 0
        self._total = (0, 0.0)
        self._groups: Sequence[StreamGroup] = ()
        self._tables = torch.empty(0)
        self._next = 0

    @property
    def finished(self) -> bool:
        """All groups were waited for and released."""
        return self._next == len(self._groups)

    def start(self, groups: Sequence[StreamGroup], num_experts: int, sizes: tuple[int, int, int]) -> None:
        """Begins a pass, after the work that the computing stream has been given. `sizes`: bytes of gate, up, down."""
        gate, up, _ = sizes
        tables = torch.full((len(groups), num_experts, 3), -1, dtype=torch.int64)
        for i, group in enumerate(groups):
            assert group.nbytes <= self.part_bytes, "a group fits a part"
            begin = torch.tensor(group.starts, dtype=torch.int64) + i % self.num_parts * self.part_bytes
            tables[i, list(group.experts)] = torch.stack([begin, begin + gate, begin + gate + up], dim=1)
        self._tables = tables.to(self.arena.device)
        self._begin_timing()
        self._groups, self._next = groups, 0
        self._fill()

    def suspend(self) -> SuspendedStream:
        """The pass as it stands, with all groups that it has waited for released; another one may `start`."""
        return SuspendedStream(self._groups, self._tables, self._next)

    def resume(self, suspended: SuspendedStream) -> None:
        """Goes on with it. What the ring had of it is copied again; its copies are not timed."""
        self.traffic()
        self._timing, self._pass_bytes = None, 0
        self._groups, self._tables, self._next = suspended.groups, suspended.tables, suspended.next
        self._fill()

    def wait(self, layer: int) -> torch.Tensor:
        """The table of the next group, which is one of `layer`'s; what is enqueued now finds its experts there."""
        group = self._groups[self._next]
        assert group.layer == layer, f"the stream is at layer {group.layer}, not {layer}"
        if self._copies is not None:
            torch.cuda.current_stream(self.arena.device).wait_event(self._copied[self._next % self.num_parts])
        return self._tables[self._next]

    def release(self) -> None:
        """All work on the group is enqueued: its part is filled anew behind it."""
        done = self._next
        self._next += 1
        if done + self.num_parts < len(self._groups):
            self._mark_used(done % self.num_parts)
            self._enqueue(done + self.num_parts)

    def traffic(self) -> tuple[int, float]:
        """Bytes copied by passes that are over, and seconds from their first copies to their last."""
        if self._pass_bytes and self._timing is not None and self._timing[1].query():  # type: ignore[no-untyped-call]
            began, ended = self._timing
            seconds = began.elapsed_time(ended) / 1e3
            self._total = (self._total[0] + self._pass_bytes, self._total[1] + seconds)
            self._pass_bytes = 0
        return self._total

    def _fill(self) -> None:
        """The next groups into all parts."""
        for index in range(self._next, min(self._next + self.num_parts, len(self._groups))):
            self._mark_used(index % self.num_parts)
            self._enqueue(index)

    def _begin_timing(self) -> None:
        self.traffic()
        self._pass_bytes = 0
        if self._copies is not None:
            events = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._timing = (next(events), next(events))
            self._timing[0].record(self._copies)

    def _end_timing(self) -> None:
        if self._timing is not None and self._copies is not None and self.copies_enabled:
            self._timing[1].record(self._copies)
            self._pass_bytes = sum(group.nbytes for group in self._groups)

    def groups_left(self, layer: int) -> int:
        """How many of the next groups are of `layer`."""
        count = 0
        while self._next + count < len(self._groups) and self._groups[self._next + count].layer == layer:
            count += 1
        return count

    def _mark_used(self, part: int) -> None:
        if self._copies is not None:
            self._used[part].record(torch.cuda.current_stream(self.arena.device))

    def _enqueue(self, index: int) -> None:
        part = index % self.num_parts
        place = self.arena.data_ptr() + part * self.part_bytes
        stream = 0
        if self._copies is not None:
            self._copies.wait_event(self._used[part])
            stream = self._copies.cuda_stream
        for address, offset, nbytes in self._groups[index].copies if self.copies_enabled else ():
            self._driver.copy_to_device(stream, place + offset, address, nbytes)
        if self._copies is not None:
            self._copied[part].record(self._copies)
        if index == len(self._groups) - 1:
            self._end_timing()
