"""Reader of the safetensors format that believes nothing a header says.

Layout: u64 little-endian header size N, N bytes of UTF-8 JSON (space padded), then the tensor bytes. The JSON maps a
tensor name to `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the end of the header; the
tensors must cover the rest of the file without holes or overlaps. `__metadata__` maps strings to strings.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proa.core.errors import CheckpointError
from proa.core.mapped_file import REDOWNLOAD, check_end, map_file
from proa.core.names import check_tensor_name, shortened
from proa.weights.json_file import parse_json_object

__all__ = ["NUMPY_DTYPES", "SafetensorsFile", "TensorEntry"]

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8

# Types numpy lacks are viewed as unsigned integers of their width, F4 as bytes of two elements.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "F8_E4M3": "u1",
        "F8_E5M2": "u1",
        "F8_E8M0": "u1",
        "F4": "u1",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U64": "<u8",
        "U32": "<u4",
        "U16": "<u2",
        "U8": "u1",
        "BOOL": "?",
    }.items()
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes `[begin, end)` of its file. `shape` counts elements, of F4 too."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """One mapped file. The arrays it hands out are read-only views of the mapping and keep it alive."""

    def __init__(
        self, path: Path, mapping: mmap.mmap, entries: dict[str, TensorEntry], metadata: dict[str, str]
    ) -> None:
        self.path = path
        self.entries = entries
        self.metadata = metadata
        self._mapping = mapping

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Map `path` and check its whole header. CheckpointError naming the file (and tensor) for any fault."""
        mapping = map_file(path, "a safetensors file", 8)
        return cls(path, mapping, *_parse_header(mapping, str(path)))

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self._mapping)

    @property
    def header(self) -> bytes:
        """The header as stored, its size included."""
        return self._mapping[: 8 + int.from_bytes(self._mapping[:8], "little")]

    def array(self, name: str, stored: np.ndarray | None = None) -> np.ndarray:
        """The tensor as a read-only array `[*shape]`, F4 as `[..., n / 2]`; zero copy unless the file misaligns it.

        `stored`: its bytes, uint8 `[nbytes]`, where they have been read already; else those of the mapping.
        """
        entry = self.entries[name]
        dtype = NUMPY_DTYPES[entry.dtype]
        shape = _stored_shape(entry.dtype, list(entry.shape), name)
        if entry.nbytes == 0:
            return np.empty(shape, dtype)
        flat = np.frombuffer(self.stored_bytes(name) if stored is None else stored, dtype)
        flat.flags.writeable = False
        if not flat.flags.aligned:
            flat = flat.copy()
        return flat.reshape(shape)

    def stored_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes as a uint8 view `[nbytes]` of the mapping.

        CheckpointError when the file has been cut short since: touching what is gone would end the process.
        """
        entry = self.entries[name]
        check_end(self._mapping, entry.end, f"{self.path}: {name}")
        return np.frombuffer(self._mapping, np.uint8, entry.nbytes, entry.begin)

    def release_pages(self) -> None:
        """Unmap all pages from this process; reading them again faults them back in, mostly from the page cache."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def _parse_header(mapping: mmap.mmap, where: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    header_bytes = int.from_bytes(mapping[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(where, f"a header of at most {MAX_HEADER_BYTES} bytes", f"{header_bytes}", REDOWNLOAD)
    if header_bytes > len(mapping) - 8:
        got = f"{header_bytes} in a file of {len(mapping)} bytes"
        raise CheckpointError(where, "a header size inside the file", got, REDOWNLOAD)
    header = parse_json_object(mapping[8 : 8 + header_bytes], where)
    metadata = _checked_metadata(header.pop("__metadata__", {}), where)
    data_begin = 8 + header_bytes
    entries = {name: _parse_entry(name, value, data_begin, where) for name, value in header.items()}
    _check_cover(entries, data_begin, len(mapping), where)
    return entries, metadata


def _checked_metadata(metadata: Any, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(where, "__metadata__ to map strings to strings", type(metadata).__name__)
    return metadata


def _parse_entry(name: str, value: Any, data_begin: int, where: str) -> TensorEntry:
    check_tensor_name(name, where)
    where = f"{where}: {name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(where, "an object with dtype, shape and data_offsets", shortened(value))
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise CheckpointError(where, f"a dtype out of {', '.join(NUMPY_DTYPES)}", shortened(dtype))
    shape = value["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(dim) for dim in shape):
        raise CheckpointError(where, f"a shape of at most {MAX_RANK} non-negative integers", shortened(shape))
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(where, "data_offsets of two non-negative integers", shortened(offsets))
    # Python integers do not overflow, so a product of any size is compared as it is.
    nbytes = NUMPY_DTYPES[dtype].itemsize
    for dim in _stored_shape(dtype, shape, where):
        nbytes *= dim
    begin, end = offsets
    if end - begin != nbytes:
        raise CheckpointError(where, f"{shortened(nbytes)} bytes for {dtype} {shape}", f"data_offsets {offsets}")
    return TensorEntry(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _stored_shape(dtype: str, shape: list[int], where: str) -> list[int]:
    """Shape in items of numpy's type."""
    if dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise CheckpointError(where, "an even last dimension for F4", shortened(shape))
    return [*shape[:-1], shape[-1] // 2]


def _check_cover(entries: dict[str, TensorEntry], data_begin: int, file_bytes: int, where: str) -> None:
    position = data_begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin < position:
            got = f"bytes {entry.begin}..{entry.end} that overlap the tensor before"
            raise CheckpointError(f"{where}: {entry.name}", "bytes of its own", got)
        if entry.begin > position:
            got = f"a hole of {entry.begin - position} bytes"
            raise CheckpointError(f"{where}: {entry.name}", "no gap before the tensor", got, REDOWNLOAD)
        if entry.end > file_bytes:
            got = f"{entry.end} in a file of {file_bytes} bytes (truncated?)"
            raise CheckpointError(f"{where}: {entry.name}", "an end inside the file", got, REDOWNLOAD)
        position = entry.end
    if position != file_bytes:
        raise CheckpointError(where, f"{position} bytes as its header says", f"{file_bytes} bytes", REDOWNLOAD)


def _is_size(value: Any) -> bool:
    # The upper limit keeps error messages and products short; no file is larger.
    return type(value) is int and 0 <= value < 1 << 63
