"""The header of a GGUF file, versions 2 and 3, little endian: metadata and where each tensor lies.

Layout: "GGUF", u32 version, u64 tensor count, u64 metadata count; per metadata entry a string key, u32 type, value; per
tensor a string name, u32 rank, u64 sizes (innermost first), u32 type, u64 offset. Strings are u64 length and bytes,
arrays u32 element type, u64 length and elements. Tensor bytes follow at the next multiple of `general.alignment`
(32 unless set), in the order of their entries, each padded to the alignment; offsets count from there.

Nothing is believed: every length is compared with what is left of the file before it is used, and arrays stay where
they are until somebody asks for their values, so a header costs no more memory than its own size.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from proa.core.errors import CheckpointError
from proa.core.mapped_file import REDOWNLOAD
from proa.core.names import check_tensor_name
from proa.gguf.types import GGML_TYPES, GgmlType

__all__ = ["GgufArray", "GgufEntry", "GgufHeader", "MetadataValue", "parse_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Tokenizers of 250 000 words take some 10 MB; the limit bounds how long a hostile header can keep us busy.
MAX_HEADER_BYTES = 128 << 20
# Parsed entries take several times their bytes in the file; real models have some 2 000 tensors, 70 000 at most.
MAX_TENSORS = 1 << 18
MAX_METADATA = 1 << 16
MAX_RANK = 4
MAX_KEY_BYTES = 1024
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
# The least an entry takes: for metadata a key of one byte and a value of one; for tensors a name and rank of one.
MIN_METADATA_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A metadata array, still in the file: `dtype` None for strings. `data` is a uint8 view of its elements."""

    dtype: np.dtype[Any] | None
    length: int
    data: np.ndarray

    def values(self) -> list[bytes] | np.ndarray:
        """The elements: numbers as an array, strings as bytes, for nobody promises that they are UTF-8."""
        if self.dtype is not None:
            return np.frombuffer(self.data, self.dtype, self.length).copy()
        raw, position, strings = self.data.tobytes(), 0, []
        for _ in range(self.length):
            begin = position + 8
            position = begin + _U64.unpack_from(raw, position)[0]
            strings.append(raw[begin:position])
        return strings


MetadataValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """Where one tensor lies: bytes `[begin, end)` of its file. `shape`: outermost size first, as numpy counts."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A whole header, checked."""

    version: int
    metadata: dict[str, MetadataValue]
    entries: dict[str, GgufEntry]


def parse_header(mapping: mmap.mmap, where: str) -> GgufHeader:
    """Check the header at the start of `mapping`. CheckpointError naming `where` and the key or tensor at fault."""
    cursor = _Cursor(mapping, where)
    if mapping[: len(MAGIC)] != MAGIC:
        raise CheckpointError(where, "a GGUF file, starting with 'GGUF'", repr(mapping[: len(MAGIC)]), REDOWNLOAD)
    cursor.take(len(MAGIC), "the magic")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        got = f"a big-endian file (version {version:#x})" if swapped else f"version {version}"
        fix = "convert the model again with a current llama.cpp, on a little-endian machine"
        raise CheckpointError(where, f"little-endian GGUF of version {VERSIONS[0]} or {VERSIONS[1]}", got, fix)
    num_tensors = cursor.u64("the tensor count")
    num_metadata = cursor.u64("the metadata count")
    cursor.check_count(num_metadata, MIN_METADATA_BYTES, "metadata entries", limit=MAX_METADATA)
    cursor.check_count(num_tensors, MIN_TENSOR_BYTES, "tensors", limit=MAX_TENSORS)
    metadata = _read_metadata(cursor, num_metadata)
    alignment = _alignment(metadata, where)
    entries = _read_entries(cursor, num_tensors, alignment)
    return GgufHeader(version, metadata, entries)


class _Cursor:
    """Reads forward through the header; every length is checked against the end of the file first."""

    def __init__(self, mapping: mmap.mmap, where: str) -> None:
        self.mapping = mapping
        self.where = where
        self.position = 0
        self.end = min(len(mapping), MAX_HEADER_BYTES)

    def take(self, num_bytes: int, what: str, where: str = "") -> int:
        """Skip `num_bytes` and return where they begin."""
        begin = self.position
        if num_bytes > self.end - begin:
            where = where or self.where
            if self.end < len(self.mapping) and num_bytes <= len(self.mapping) - begin:
                got = f"{what} that reaches beyond them"
                raise CheckpointError(where, f"a header of at most {MAX_HEADER_BYTES} bytes", got)
            got = f"{num_bytes} bytes at offset {begin} of {len(self.mapping)}"
            raise CheckpointError(where, f"{what} inside the file", got, REDOWNLOAD)
        self.position += num_bytes
        return begin

    def u32(self, what: str, where: str = "") -> int:
        return int(_U32.unpack_from(self.mapping, self.take(4, what, where))[0])

    def u64(self, what: str, where: str = "") -> int:
        return int(_U64.unpack_from(self.mapping, self.take(8, what, where))[0])

    def text(self, what: str, where: str = "", max_bytes: int = MAX_HEADER_BYTES) -> str:
        length = self.u64(f"the length of {what}", where)
        if length > max_bytes:
            raise CheckpointError(where or self.where, f"{what} of at most {max_bytes} bytes", f"{length} bytes")
        begin = self.take(length, what, where)
        try:
            return self.mapping[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            got = f"bytes that are not UTF-8 at offset {begin + error.start}"
            raise CheckpointError(where or self.where, f"{what} in UTF-8", got) from None

    def skip_strings(self, count: int, where: str) -> None:
        self.check_count(count, 8, "strings", where)
        for _ in range(count):
            self.take(self.u64("the length of a string", where), "a string", where)

    def check_count(
        self, count: int, min_bytes: int, what: str, where: str = "", *, limit: int = MAX_HEADER_BYTES
    ) -> None:
        """`count` things of at least `min_bytes` each have to fit into what is left of the header."""
        left = self.end - self.position
        limit = min(limit, left // min_bytes)
        if count > limit:
            raise CheckpointError(where or self.where, f"at most {limit} {what} in {left} bytes", count, REDOWNLOAD)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", max_bytes=MAX_KEY_BYTES)
        check_tensor_name(key, cursor.where)
        if key in metadata:
            raise CheckpointError(f"{cursor.where}: {key}", "one metadata entry of this name", "two")
        metadata[key] = _read_value(cursor, f"{cursor.where}: {key}")
    return metadata


def _read_value(cursor: _Cursor, where: str) -> MetadataValue:
    kind = cursor.u32("the type of a value", where)
    if kind == _STRING:
        return cursor.text("a string", where)
    if kind == _ARRAY:
        return _read_array(cursor, where)
    dtype = _scalar_type(kind, where)
    begin = cursor.take(dtype.itemsize, "a value", where)
    _check_bools(kind, np.frombuffer(cursor.mapping, np.uint8, dtype.itemsize, begin), where)
    value = np.frombuffer(cursor.mapping, dtype, 1, begin)[0].item()
    assert isinstance(value, int | float)
    return value


def _read_array(cursor: _Cursor, where: str) -> GgufArray:
    kind = cursor.u32("the type of array elements", where)
    length = cursor.u64("the length of an array", where)
    begin = cursor.position
    if kind == _STRING:
        cursor.skip_strings(length, where)
        return GgufArray(None, length, _bytes(cursor.mapping, begin, cursor.position))
    if kind == _ARRAY:
        raise CheckpointError(where, "an array of numbers, booleans or strings", "an array of arrays")
    dtype = _scalar_type(kind, where)
    cursor.take(length * dtype.itemsize, "an array", where)
    data = _bytes(cursor.mapping, begin, cursor.position)
    _check_bools(kind, data, where)
    return GgufArray(dtype, length, data)


def _scalar_type(kind: int, where: str) -> np.dtype[Any]:
    if kind not in _SCALARS:
        raise CheckpointError(where, "a metadata type from 0 to 12", kind, REDOWNLOAD)
    return _SCALARS[kind]


def _check_bools(kind: int, data: np.ndarray, where: str) -> None:
    if kind == _BOOL and data.size and data.max() > 1:
        raise CheckpointError(where, "booleans stored as 0 or 1", int(data.max()))


def _bytes(mapping: mmap.mmap, begin: int, end: int) -> np.ndarray:
    return np.frombuffer(mapping, np.uint8, end - begin, begin)


def _alignment(metadata: dict[str, MetadataValue], where: str) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    power_of_two = type(value) is int and 0 < value <= MAX_ALIGNMENT and value & (value - 1) == 0
    if not power_of_two:
        expected = f"a power of two of at most {MAX_ALIGNMENT}"
        got = value if isinstance(value, int | float) else type(value).__name__
        raise CheckpointError(f"{where}: general.alignment", expected, got)
    assert isinstance(value, int)
    return value


def _read_entries(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufEntry]:
    read = []
    for _ in range(count):
        name = cursor.text("a tensor name", max_bytes=MAX_KEY_BYTES)
        check_tensor_name(name, cursor.where)
        read.append(_read_entry(cursor, name, f"{cursor.where}: {name}"))
    data_begin = _padded(cursor.position, alignment)
    entries: dict[str, GgufEntry] = {}
    expected_offset = 0
    for entry in read:
        where = f"{cursor.where}: {entry.name}"
        if entry.name in entries:
            raise CheckpointError(where, "one tensor of this name", "two")
        if entry.begin != expected_offset:
            expected = f"offset {expected_offset}, behind the tensor before, padded to {alignment}"
            raise CheckpointError(where, expected, entry.begin, REDOWNLOAD)
        expected_offset = _padded(entry.end, alignment)
        begin, end = data_begin + entry.begin, data_begin + entry.end
        if end > len(cursor.mapping):
            got = f"bytes {begin} .. {end} in a file of {len(cursor.mapping)} bytes (truncated?)"
            raise CheckpointError(where, "a tensor inside the file", got, REDOWNLOAD)
        entries[entry.name] = GgufEntry(entry.name, entry.type, entry.shape, begin, end)
    return entries


def _read_entry(cursor: _Cursor, name: str, where: str) -> GgufEntry:
    """One entry, its offsets still relative to the start of the data."""
    rank = cursor.u32("the rank", where)
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(where, f"1 to {MAX_RANK} dimensions", rank)
    sizes = [cursor.u64("a size", where) for _ in range(rank)]
    kind = cursor.u32("the type", where)
    offset = cursor.u64("the offset", where)
    if kind not in GGML_TYPES:
        names = ", ".join(item.name for item in GGML_TYPES.values())
        raise CheckpointError(where, f"a tensor type out of {names}", f"type number {kind}")
    ggml_type = GGML_TYPES[kind]
    if not all(0 < size < 1 << 63 for size in sizes):
        raise CheckpointError(where, "sizes from 1 to 2^63 - 1", sizes)
    if sizes[0] % ggml_type.block_elements:
        expected = f"rows of a multiple of {ggml_type.block_elements} elements for {ggml_type.name}"
        raise CheckpointError(where, expected, sizes[0])
    # Python integers do not overflow: a product of any size is compared with the file as it is.
    nbytes = sizes[0] // ggml_type.block_elements * ggml_type.block_bytes
    for size in sizes[1:]:
        nbytes *= size
    return GgufEntry(name, ggml_type, tuple(reversed(sizes)), offset, offset + nbytes)


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
