"""Reads byte ranges of one file into memory: past the page cache, unless the bytes are in it already."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from proa.core.errors import CheckpointError

__all__ = ["FileReader"]


class FileReader:
    """Positioned reads of `path` by any number of threads at once.

    Bytes that nobody has read lately come by O_DIRECT: on a fast disk a copy through the page cache takes longer than
    the disk does, and it would push out what else is cached. A file system without O_DIRECT is read as usual.
    """

    def __init__(self, path: Path, mapping: int) -> None:
        """`mapping`: where the file is mapped, which tells what is cached."""
        self.path = path
        self._mapping = mapping
        self._cached = self._direct = -1
        try:
            self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(str(path), "a file that can be read", error.strerror or error) from error
        with contextlib.suppress(OSError):
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._cached = self._direct = -1

    def read(self, begin: int, into: memoryview) -> int:
        """Fills `into` from byte `begin` on; returns the number of bytes, less than asked only at the end of the file.

        `begin`, the length and the address of `into` are multiples of the page size. CheckpointError when the disk
        fails.
        """
        done = 0
        try:
            direct = self._direct >= 0 and not _is_cached(self._mapping + begin, len(into))
            while done < len(into):
                try:
                    count = os.preadv(self._direct if direct else self._cached, [into[done:]], begin + done)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    direct, count = False, -1  # opened, but not read that way here
                if count == 0:
                    break
                done += max(count, 0)
                direct = direct and done % mmap.PAGESIZE == 0
        except OSError as error:
            where = f"{self.path}: bytes {begin}..{begin + len(into)}"
            raise CheckpointError(where, "a file that can be read", error.strerror or error) from error
        return done


def _is_cached(address: int, size: int) -> bool:
    """Whether most mapped pages of `[address, address + size)` are in the page cache.

    A file of another user that this one cannot write always counts as cached (mincore(2)).
    """
    pages = size // mmap.PAGESIZE
    resident = ctypes.create_string_buffer(pages)
    if _mincore(address, size, resident) != 0:
        return False
    return 2 * resident.raw.count(b"\1") > pages


_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_mincore.restype = ctypes.c_int
