"""Reads what a loader wants next with several threads, while it packs what came before."""

from __future__ import annotations

import ctypes
import enum
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from proa.core.errors import CheckpointError
from proa.core.mapped_file import REDOWNLOAD
from proa.weights.file_reader import FileReader
from proa.weights.staging import StagingMemory

__all__ = ["WINDOW_BYTES", "ReadAhead", "ReadRange"]

WINDOW_BYTES = 512 << 20
EXTENT_BYTES = 16 << 20
PIECE_BYTES = 4 << 20
# Neighbours in a file that a loader wants further apart than this are not read at once.
MAX_RANK_GAP = 4096
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14; the mmap module has no name for it


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Bytes of a file that a loader asks for by `name`: a tensor or a part of one.

    data: the mapped bytes, uint8 [n]. begin: where they start in the file `path`. keep: the loader goes on using the
    mapped bytes, so they are not copied but brought into memory where they are.
    """

    name: str
    path: Path
    begin: int
    data: np.ndarray
    keep: bool = False

    @property
    def end(self) -> int:
        return self.begin + self.data.nbytes


class _State(enum.Enum):
    WAITING = enum.auto()
    READING = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class _Extent:
    """Ranges that lie side by side in a file, read together. `rank`: of the one wanted first.

    Those that are kept or too large are not `staged`: they are brought into memory where they are mapped.
    """

    ranges: list[ReadRange]
    rank: int
    staged: bool
    state: _State = _State.WAITING
    memory: memoryview | None = None  # of whole pages, while staged
    unread: int = 0
    pending: int = 0  # pieces in the hands of threads
    unreleased: set[str] = field(default_factory=set)

    @property
    def begin(self) -> int:
        return self.ranges[0].begin // mmap.PAGESIZE * mmap.PAGESIZE

    @property
    def nbytes(self) -> int:
        return -(-(self.ranges[-1].end - self.begin) // mmap.PAGESIZE) * mmap.PAGESIZE


class ReadAhead:
    """Threads that read `ranges`, in that order, at most `window_bytes` beyond what the loader has released.

    `view` hands out the bytes of one range and waits for them if need be; `release` gives their memory back. A loader
    that asks in another order gets what it wants next; when the window is full of bytes it holds on to, `view` returns
    None, and it reads the mapped file instead. As a context manager it ends the threads.
    """

    def __init__(self, ranges: Sequence[ReadRange], window_bytes: int = WINDOW_BYTES, num_threads: int = 0) -> None:
        extents = _extents([item for item in ranges if item.data.nbytes > 0], max(window_bytes // 2, mmap.PAGESIZE))
        self._waiting = iter(extents)
        self._next: _Extent | None = next(self._waiting, None)
        self._extent_of = {item.name: extent for extent in extents for item in extent.ranges}
        self._range_of = {item.name: item for extent in extents for item in extent.ranges}
        self._staging = StagingMemory(window_bytes)
        self._mapped_ahead = 0
        self._open: _Extent | None = None  # the one whose pieces are handed out
        self._wanted: _Extent | None = None
        self._full = self._stopped = False
        self._error: CheckpointError | None = None
        self._changed = threading.Condition()
        self._files: dict[Path, FileReader] = {}
        count = num_threads or min(max(len(os.sched_getaffinity(0)) // 2, 4), 16)
        self._threads = [
            threading.Thread(target=self._run, name=f"proa-read-{index}", daemon=True) for index in range(count)
        ]

    def __enter__(self) -> ReadAhead:
        for extent in self._extent_of.values():
            first = extent.ranges[0]
            if first.path not in self._files:
                self._files[first.path] = FileReader(first.path, first.data.ctypes.data - first.begin)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            file.close()

    def view(self, name: str) -> np.ndarray | None:
        """The bytes of `name`, uint8 [n], good until `release(name)`; None: read the mapped file.

        Raises CheckpointError when a file ends early or cannot be read.
        """
        with self._changed:
            extent = self._extent_of.get(name)
            if extent is None or extent.state is _State.GONE:
                return None
            if not extent.staged:
                if self._error is not None:
                    raise self._error
                if self._range_of[name].keep:
                    self._let_go(extent, name)
                return None
            self._wanted = extent
            self._full = False  # the threads look again whether this one fits
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_decided(extent))
            self._wanted = None
            if self._error is not None:
                raise self._error
            if extent.memory is None:
                return None
            wanted = self._range_of[name]
            offset = wanted.begin - extent.begin
            return np.frombuffer(extent.memory, np.uint8, wanted.data.nbytes, offset)

    def release(self, name: str) -> None:
        """The loader is done with the bytes of `name`."""
        with self._changed:
            extent = self._extent_of.get(name)
            if extent is not None:
                self._let_go(extent, name)

    def _is_decided(self, extent: _Extent) -> bool:
        return (
            extent.state is _State.READY
            or self._error is not None
            or self._stopped
            or (self._full and extent.state is _State.WAITING)
        )

    def _let_go(self, extent: _Extent, name: str) -> None:
        extent.unreleased.discard(name)
        if extent.unreleased or extent.state is _State.GONE:
            return
        # One that is being read goes when it is ready.
        if extent.state is not _State.READING:
            self._free(extent)

    def _free(self, extent: _Extent) -> None:
        if extent.memory is not None:
            self._staging.free(extent.memory)
            extent.memory = None
        elif extent.state is _State.READY:
            self._mapped_ahead -= extent.nbytes
        extent.state = _State.GONE
        self._full = False
        self._changed.notify_all()

    def _run(self) -> None:
        while (piece := self._take_piece()) is not None:
            extent, first, size = piece
            try:
                self._read(extent, first, size)
                error = None
            except CheckpointError as caught:
                error = caught
            with self._changed:
                extent.pending -= 1
                self._error = self._error or error
                if extent.pending == 0 and extent.unread == 0:
                    extent.state = _State.READY
                    if not extent.unreleased:
                        self._free(extent)
                self._changed.notify_all()

    def _take_piece(self) -> tuple[_Extent, int, int] | None:
        """(extent, offset in it, bytes) to read next, waiting for room; None when all is read or the loader is done."""
        with self._changed:
            while not self._stopped and self._error is None:
                if self._open is None:
                    self._open = self._start_extent()
                if self._open is not None:
                    extent = self._open
                    size = min(PIECE_BYTES, extent.unread)
                    first = extent.nbytes - extent.unread
                    extent.unread -= size
                    extent.pending += 1
                    if extent.unread == 0:
                        self._open = None
                    return extent, first, size
                self._changed.wait()
            return None

    def _start_extent(self) -> _Extent | None:
        """The extent the loader waits for, else the next in order; None when there is no room or none left."""
        while self._next is not None and self._next.state is not _State.WAITING:
            self._next = next(self._waiting, None)
        wanted = self._wanted if self._wanted is not None and self._wanted.state is _State.WAITING else None
        extent = wanted or self._next
        if extent is None or (wanted is None and self._full):
            return None
        if not extent.staged:
            if self._mapped_ahead + extent.nbytes > max(self._staging.capacity, extent.nbytes):
                return None
            self._mapped_ahead += extent.nbytes
        else:
            extent.memory = self._staging.take(extent.nbytes)
            if extent.memory is None:
                self._full = True
                self._changed.notify_all()
                return None
        extent.state = _State.READING
        extent.unread = extent.nbytes
        return extent

    def _read(self, extent: _Extent, first: int, size: int) -> None:
        item = extent.ranges[0]
        if not extent.staged:
            if not _populate(item.data.ctypes.data - item.begin + extent.begin + first, size):
                where = f"{item.path}: {item.name}"
                raise CheckpointError(where, "bytes that can be read", "a failing disk, or a file that was cut short")
            return
        assert extent.memory is not None
        begin = extent.begin + first
        count = self._files[item.path].read(begin, extent.memory[first : first + size])
        end = min(begin + size, extent.ranges[-1].end)
        if begin + count < end:
            cut = next(item for item in extent.ranges if item.end > begin + count)
            expected, got = f"bytes up to {cut.end}", f"a file that ends at {begin + count}"
            raise CheckpointError(f"{cut.path}: {cut.name}", expected, got, REDOWNLOAD)


def _extents(ranges: Sequence[ReadRange], max_staged: int) -> list[_Extent]:
    """Neighbours in a file joined to at most EXTENT_BYTES, in the order of the first of each."""
    join_bytes = min(EXTENT_BYTES, max_staged)
    ordered = sorted(enumerate(ranges), key=lambda pair: (str(pair[1].path), pair[1].begin))
    extents: list[_Extent] = []
    for rank, item in ordered:
        last = extents[-1] if extents else None
        if last is not None and _joins(last, rank, item, join_bytes):
            last.ranges.append(item)
            last.rank = min(last.rank, rank)
        else:
            extents.append(_Extent([item], rank, not item.keep and item.data.nbytes <= max_staged))
        extents[-1].unreleased.add(item.name)
    return sorted(extents, key=lambda extent: extent.rank)


def _joins(extent: _Extent, rank: int, item: ReadRange, join_bytes: int) -> bool:
    last = extent.ranges[-1]
    return (
        extent.staged
        and last.path == item.path
        and not item.keep
        and 0 <= item.begin - last.end < mmap.PAGESIZE
        and abs(rank - extent.rank) <= MAX_RANK_GAP
        and item.end - extent.begin <= join_bytes
    )


def _populate(address: int, size: int) -> bool:
    """Map every page of whole pages for reading, waiting for the disk without the interpreter lock.

    False: touching them would be SIGBUS.
    """
    if _madvise(address, size, _MADV_POPULATE_READ) == 0:
        return True
    if ctypes.get_errno() == errno.EFAULT:
        return False
    # An older kernel: start the reads at least.
    _madvise(address, size, mmap.MADV_WILLNEED)
    return True


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int
