"""Brings the pages a loader reads next into memory while it packs the ones before."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

__all__ = ["ReadAhead", "ReadRange"]

_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14; the mmap module has no name for it
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Bytes of one tensor; `data` is the mapping as uint8."""

    name: str
    data: np.ndarray


class ReadAhead:
    """A thread that faults in `ranges` in order, at most `window_bytes` beyond the furthest one the loader reached.

    It only warms memory: a loader that reads in another order, or never reaches a range, is right all the same. Kernel
    read-ahead alone stops at 128 KiB and at every jump between tensors, and madvise(WILLNEED) is cut to the same size.
    """

    def __init__(self, ranges: Sequence[ReadRange], window_bytes: int = 1 << 30) -> None:
        self._ranges = [item for item in ranges if item.data.nbytes > 0]
        self._ends: dict[str, int] = {}
        position = 0
        for item in self._ranges:
            position += item.data.nbytes
            self._ends[item.name] = position
        self._window_bytes = window_bytes
        self._reached = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="proa-read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def reached(self, name: str) -> None:
        """The loader reads `name` now."""
        end = self._ends.get(name, 0)
        with self._changed:
            if end > self._reached:
                self._reached = end
                self._changed.notify()

    def _run(self) -> None:
        position = 0
        for item in self._ranges:
            for begin in range(0, item.data.nbytes, _CHUNK_BYTES):
                chunk = item.data[begin : begin + _CHUNK_BYTES]
                if not self._wait_until_wanted(position + chunk.nbytes):
                    return
                # What the loader has passed already it has faulted in itself.
                if position + chunk.nbytes > self._reached:
                    _populate(chunk)
                position += chunk.nbytes

    def _wait_until_wanted(self, end: int) -> bool:
        """Block until `end` lies in the window; False when the loader is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or end <= self._reached + self._window_bytes)
            return not self._stopped


def _populate(data: np.ndarray) -> None:
    """Map every page of `data` for reading, waiting for the disk without the interpreter lock."""
    begin = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = data.ctypes.data + data.nbytes - begin
    if _madvise(begin, length, _MADV_POPULATE_READ) != 0:
        # An older kernel: start the reads at least.
        _madvise(begin, length, mmap.MADV_WILLNEED)


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int
