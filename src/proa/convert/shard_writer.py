"""One safetensors file whose tensors are written in any order by several threads, and which appears whole or not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proa.weights.converted_experts import tensor_checksum
from proa.weights.safetensors import NUMPY_DTYPES

__all__ = ["PlannedTensor", "ShardWriter", "partial_path", "sync_directory"]

_PAGE_BYTES = 4096
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * NUMPY_DTYPES[self.dtype].itemsize


class ShardWriter:
    """Writes `tensors`, in that order in the file, beside `path` and renames to it at the end.

    The header comes first but is known last (it holds checksums), so its room is planned with values of full width and
    rounded up to a page, which also makes the tensors begin on one. `metadata`: entries known now; `late`: names of
    those that `finish` gives, of at most 32 characters.
    """

    def __init__(
        self, path: Path, tensors: Sequence[PlannedTensor], metadata: Mapping[str, str], late: Sequence[str]
    ) -> None:
        self._path = path
        self._metadata = dict(metadata)
        self._entries: dict[str, dict[str, object]] = {}
        self._checksums = {tensor.name: "0" * 16 for tensor in tensors}
        position = 0
        self._offsets: dict[str, int] = {}
        for tensor in tensors:
            end = position + tensor.nbytes
            self._entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            self._offsets[tensor.name] = position
            position = end
        header = self._header(dict.fromkeys(late, "0" * 32))
        self._data_begin = -(-(8 + len(header)) // _PAGE_BYTES) * _PAGE_BYTES
        self.nbytes = self._data_begin + position
        self._lock = threading.Lock()
        self._file = -1

    def __enter__(self) -> ShardWriter:
        """Reserves the space of the whole file. OSError when there is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file = os.open(partial_path(self._path), flags, 0o644)
        try:
            os.posix_fallocate(self._file, 0, self.nbytes)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                self._discard()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def write(self, name: str, values: np.ndarray) -> None:
        """One tensor, in the numpy type that stands for its dtype. Thread-safe."""
        entry = self._entries[name]
        assert list(values.shape) == entry["shape"] and values.dtype == NUMPY_DTYPES[str(entry["dtype"])], name
        contiguous = np.ascontiguousarray(values).reshape(-1)
        checksum = tensor_checksum(contiguous)
        self._pwrite(contiguous.view(np.uint8), self._data_begin + self._offsets[name])
        with self._lock:
            self._checksums[name] = checksum

    def finish(self, late: Mapping[str, str]) -> None:
        """Every tensor is written: makes the file durable under its name."""
        assert all(len(value) <= 32 for value in late.values())
        room = self._data_begin - 8
        header = self._header(late).ljust(room)
        self._pwrite(np.frombuffer(room.to_bytes(8, "little") + header, np.uint8), 0)
        os.fsync(self._file)
        # The pages are clean now and nobody reads them soon.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._file)
        self._file = -1
        partial_path(self._path).rename(self._path)
        sync_directory(self._path.parent)

    def _header(self, late: Mapping[str, str]) -> bytes:
        metadata = {**self._metadata, **late, "xxh64": json.dumps(self._checksums, separators=(",", ":"))}
        return json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()

    def _pwrite(self, data: np.ndarray, offset: int) -> None:
        view = data.data
        while view.nbytes:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                partial_path(self._path).unlink()


def partial_path(path: Path) -> Path:
    """Where a file lies until it is whole."""
    return path.with_name(f".{path.name}.partial")


def sync_directory(directory: Path) -> None:
    """Makes renames in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
