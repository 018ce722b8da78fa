"""One block of memory that file ranges are read into, used again and again."""

from __future__ import annotations

import mmap

__all__ = ["StagingMemory"]

SLOT_BYTES = 1 << 20


class StagingMemory:
    """`capacity` bytes in slots of 1 MiB. Runs of slots are taken and freed in any order; not thread-safe.

    Reused and not taken fresh: the kernel would zero every page first, as much work as filling it.
    """

    def __init__(self, capacity: int) -> None:
        self._free = [True] * max(capacity // SLOT_BYTES, 1)
        self.capacity = len(self._free) * SLOT_BYTES
        self._memory = mmap.mmap(-1, self.capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._first_slots: dict[int, int] = {}  # by id of the memory handed out

    def take(self, nbytes: int) -> memoryview | None:
        """`nbytes` that start at a page, None when no run of free slots is long enough."""
        count = -(-nbytes // SLOT_BYTES)
        run = 0
        for slot, is_free in enumerate(self._free):
            run = run + 1 if is_free else 0
            if run == count:
                first = slot + 1 - count
                self._free[first : slot + 1] = [False] * count
                memory = self._view[first * SLOT_BYTES : first * SLOT_BYTES + nbytes]
                self._first_slots[id(memory)] = first
                return memory
        return None

    def free(self, memory: memoryview) -> None:
        """Gives back what `take` returned: that very object, whose bytes will be overwritten."""
        first = self._first_slots.pop(id(memory))
        count = -(-memory.nbytes // SLOT_BYTES)
        self._free[first : first + count] = [True] * count
