"""Writes a Hugging Face checkpoint tensor by tensor, in constant memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from proa.convert.encoding import stored_tensors
from proa.weights.checkpoint import INDEX_FILE
from proa.weights.linear import RawLinear
from proa.weights.safetensors import NUMPY_DTYPES

__all__ = ["CheckpointWriter"]

# The header comes first in a shard but is known last. Its room is reserved (JSON allows trailing spaces), which also
# makes the tensors start on a page.
_HEADER_END = 1 << 20
_HEADER_ROOM = _HEADER_END - 8


class CheckpointWriter:
    """Context manager; on a clean exit the shards have their final names and the index lies beside them.

    `on_bytes(n)` is called after every tensor of n bytes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_shard_bytes: int = 2 << 30,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._on_bytes = on_bytes
        self._shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._position = self._header_bytes = 0
        self._total_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            self._file.close()

    def add(self, name: str, dtype: str, values: np.ndarray) -> None:
        """Append one tensor; `values` in the numpy type safetensors' `dtype` is viewed as (bf16: uint16)."""
        assert values.dtype == NUMPY_DTYPES[dtype], f"{name}: {values.dtype} is not {dtype}"
        # An entry is at most its name, two offsets, the shape and some 60 characters of punctuation.
        entry_bytes = len(json.dumps(name)) + 20 * (2 + values.ndim) + 60
        full = self._position + values.nbytes > self._max_shard_bytes or self._header_bytes + entry_bytes > _HEADER_ROOM
        # The format has no padding, and readers view the bytes in place: only a new shard brings alignment back.
        misaligned = self._position % values.dtype.itemsize != 0
        if self._file is None or misaligned or (full and self._position > 0):
            self._begin_shard()
        assert self._file is not None
        end = self._position + values.nbytes
        self._shards[-1][name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [self._position, end],
        }
        self._file.write(np.ascontiguousarray(values).data)
        self._position, self._header_bytes = end, self._header_bytes + entry_bytes
        self._total_bytes += values.nbytes
        if self._on_bytes is not None:
            self._on_bytes(values.nbytes)

    def add_linear(self, prefix: str, linear: RawLinear) -> None:
        """Append the tensors of one linear under the names its format uses."""
        for suffix, (dtype, values) in stored_tensors(linear).items():
            self.add(f"{prefix}.{suffix}", dtype, values)

    def _begin_shard(self) -> None:
        self._end_shard()
        self._shards.append({})
        self._file = self._shard_path(len(self._shards)).open("wb")
        self._file.seek(_HEADER_END)
        self._position = self._header_bytes = 0

    def _end_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._shards[-1], separators=(",", ":")).encode()
        assert len(header) <= _HEADER_ROOM
        self._file.seek(0)
        self._file.write(_HEADER_ROOM.to_bytes(8, "little") + header.ljust(_HEADER_ROOM))
        self._file.close()
        self._file = None

    def _finish(self) -> None:
        self._end_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, entries in enumerate(self._shards, 1):
            final = self._directory / f"model-{number:05d}-of-{count:05d}.safetensors"
            self._shard_path(number).rename(final)
            weight_map.update(dict.fromkeys(entries, final.name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=1))

    def _shard_path(self, number: int) -> Path:
        return self._directory / f"shard-{number:05d}.partial"
