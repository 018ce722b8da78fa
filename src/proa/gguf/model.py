"""GGUF files: one mapped file, and a model of one or several of them (split.no, split.count)."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proa.core.errors import CheckpointError
from proa.core.mapped_file import REDOWNLOAD, check_end, map_file
from proa.gguf.header import GgufEntry, GgufHeader, MetadataValue, parse_header
from proa.gguf.types import GgmlType

__all__ = ["GgufFile", "GgufModel", "GgufTensor"]

_SUFFIX = ".gguf"
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_MIN_BYTES = 24


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor, not converted.

    `shape` counts elements, outermost first. `data` is a read-only uint8 view of the file, `[*shape[:-1], row bytes]`:
    whole blocks of `type`.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    data: np.ndarray


class GgufFile:
    """One mapped file. The arrays it hands out are read-only views of the mapping and keep it alive."""

    def __init__(self, path: Path, mapping: mmap.mmap, header: GgufHeader) -> None:
        self.path = path
        self.metadata = header.metadata
        self.entries = header.entries
        self._mapping = mapping

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map `path` and check its whole header. CheckpointError naming the file (and key or tensor) for any fault."""
        mapping = map_file(path, "a GGUF file", _MIN_BYTES)
        return cls(path, mapping, parse_header(mapping, str(path)))

    def tensor(self, name: str) -> GgufTensor:
        """The tensor `name`, which must be one of `entries`.

        CheckpointError when the file has been cut short since: touching what is gone would end the process.
        """
        entry = self.entries[name]
        check_end(self._mapping, entry.end, f"{self.path}: {name}")
        flat = np.frombuffer(self._mapping, np.uint8, entry.nbytes, entry.begin)
        return GgufTensor(name, entry.type, entry.shape, flat.reshape(*entry.shape[:-1], -1))

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self._mapping)

    @property
    def header(self) -> bytes:
        """Everything before the first tensor's bytes."""
        return self._mapping[: min((entry.begin for entry in self.entries.values()), default=len(self._mapping))]

    def release_pages(self, begin: int, end: int) -> None:
        """Unmap the pages of bytes `[begin, end)`; reading them again faults them in, mostly from the page cache."""
        first = begin - begin % mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


class GgufModel:
    """All tensors of a model, whichever of its files they lie in."""

    def __init__(self, path: Path, files: list[GgufFile]) -> None:
        self.path = path
        self.files = files
        self._files_of: dict[str, GgufFile] = {}
        for file in files:
            for name in file.entries:
                if name in self._files_of:
                    got = f"one in {self._files_of[name].path.name} too"
                    raise CheckpointError(f"{file.path}: {name}", "a tensor no other file of the model has", got)
                self._files_of[name] = file

    @classmethod
    def open(cls, path: str | Path) -> GgufModel:
        """`path`: a file, any file of a split model, or a directory that holds one model and no other.

        Maps every file and checks all headers, reading no weights. CheckpointError for any fault.
        """
        location = Path(path)
        try:
            first = _only_model(location) if location.is_dir() else location
        except OSError as error:
            raise CheckpointError(str(location), "a readable directory", error.strerror or error) from error
        file = GgufFile.open(first)
        count = _split_number(file, "split.count") or 1
        return cls(first, [file] if count == 1 else _open_split(file, count))

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        """Of the first file; the others of a split model repeat none of it."""
        return self.files[0].metadata

    @property
    def names(self) -> Iterable[str]:
        return self._files_of.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._files_of

    def entry(self, name: str) -> GgufEntry:
        return self._file(name).entries[name]

    def tensor(self, name: str) -> GgufTensor:
        """The stored tensor. CheckpointError when the model lacks it."""
        return self._file(name).tensor(name)

    def where(self, name: str) -> str:
        """File and tensor, for error messages."""
        return f"{self._file(name).path}: {name}"

    def offset(self, name: str) -> tuple[Path, int]:
        """The file the tensor lies in, and its first byte there."""
        file = self._file(name)
        return file.path, file.entries[name].begin

    def release(self, name: str, rows: slice) -> None:
        """Entries `rows` of the outermost dimension are copied: their pages leave this process and stay readable."""
        file = self._file(name)
        entry = file.entries[name]
        row_bytes = entry.nbytes // entry.shape[0]
        file.release_pages(entry.begin + rows.start * row_bytes, entry.begin + rows.stop * row_bytes)

    def _file(self, name: str) -> GgufFile:
        try:
            return self._files_of[name]
        except KeyError:
            raise CheckpointError(str(self.path), f"a tensor {name!r}", "no such tensor") from None


def _only_model(directory: Path) -> Path:
    """The first file of the only model in `directory`."""
    names = sorted(item.name for item in directory.iterdir() if item.suffix == _SUFFIX)
    models: dict[str, str] = {}
    for name in names:
        split = _SPLIT_NAME.fullmatch(name)
        models.setdefault(f"{split['stem']} in {int(split['count'])} files" if split else name, name)
    if len(models) != 1:
        got = f"{len(models)}: {', '.join(models)}"[:400] if models else "no .gguf file"
        raise CheckpointError(str(directory), "one GGUF model", got, "name the file, or the first of a split model")
    return directory / next(iter(models.values()))


def _open_split(file: GgufFile, count: int) -> list[GgufFile]:
    """All files of the model that `file` is one of."""
    name = _SPLIT_NAME.fullmatch(file.path.name)
    if name is None or int(name["count"]) != count:
        expected = f"a name that ends in -NNNNN-of-{count:05}.gguf, for split.count is {count}"
        raise CheckpointError(str(file.path), expected, file.path.name, "name the files of a split model as published")
    files = []
    for number in range(count):
        path = file.path.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf")
        part = file if path == file.path else GgufFile.open(path)
        for key, expected_value in (("split.no", number), ("split.count", count)):
            value = _split_number(part, key)
            if value != expected_value:
                raise CheckpointError(f"{path}: {key}", str(expected_value), "none" if value is None else value)
        files.append(part)
    stated = _split_number(files[0], "split.tensors.count")
    found = sum(len(part.entries) for part in files)
    if stated not in (None, found):
        where = f"{files[0].path}: split.tensors.count"
        raise CheckpointError(where, f"{found}, what the {count} files hold", stated, REDOWNLOAD)
    return files


def _split_number(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        got = value if isinstance(value, int | float) else type(value).__name__
        raise CheckpointError(f"{file.path}: {key}", "an integer that is not negative", got)
    assert value is None or isinstance(value, int)
    return value
