"""A Hugging Face checkpoint directory: config.json and the safetensors files beside it. No code in it ever runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from proa.core.errors import CheckpointError
from proa.core.names import check_tensor_name
from proa.weights.json_file import read_json_object
from proa.weights.quantization import Quantization, parse_quantization
from proa.weights.read_ahead import WINDOW_BYTES, ReadAhead, ReadRange
from proa.weights.safetensors import SafetensorsFile

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Checkpoint", "RawTensor", "language_model_name", "read_index"]

logger = logging.getLogger("proa.weights")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20
RELEASE_BYTES = 256 << 20

# Multimodal wrappers store the language model below a prefix: Kimi K2.5 and later, Qwen3.5 and later.
WRAPPERS = {"language_model.": "", "model.language_model.": "model."}

_LAYER = re.compile(r"\blayers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"(.*\.experts\.[0-9]{1,9})\.")

UNSAFE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One stored tensor, not converted. `data` is a read-only view of the file; bf16 is uint16, fp8 is uint8."""

    name: str
    dtype: str  # as the file spells it: F32, BF16, F16, F8_E4M3, I32, ...
    shape: tuple[int, ...]
    data: np.ndarray


class Checkpoint:
    """An opened checkpoint directory.

    Tensor names are those of the language model: a stored `language_model.model.norm.weight` is `model.norm.weight`,
    and so is `model.language_model.norm.weight`.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], quantization: Quantization, files: list[SafetensorsFile]
    ) -> None:
        self.path = path
        self.config = config
        self.quantization = quantization
        self._files = files
        self._locations = _locate(files)
        self._released_bytes = 0
        self._read_ahead: ReadAhead | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Map every shard and check all headers, reading no weights.

        CheckpointError: missing, damaged or inconsistent directory. UnsupportedError: unknown quantization.
        """
        directory = Path(path)
        fix = "give the path of a local checkpoint directory; proa downloads nothing"
        try:
            if not directory.is_dir():
                raise CheckpointError(str(directory), "a checkpoint directory", "no such directory", fix)
            config = read_json_object(directory / "config.json", MAX_CONFIG_BYTES)
            quantization = parse_quantization(quantization_config(config), str(directory / "config.json"))
            return cls(directory, config, quantization, _open_files(directory))
        except OSError as error:  # no permission to look into it, a name too long, a disk that fails
            raise CheckpointError(str(directory), "a readable directory", error.strerror or error, fix) from error

    @property
    def names(self) -> Iterable[str]:
        return self._locations.keys()

    @property
    def files(self) -> Sequence[SafetensorsFile]:
        return self._files

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.nbytes(name) for name in self._locations)

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, empty when the directory has none."""
        path = self.path / "generation_config.json"
        return read_json_object(path, MAX_CONFIG_BYTES) if path.exists() else {}

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def tensor(self, name: str) -> RawTensor:
        """The stored tensor, good until `release(name)`. CheckpointError when the checkpoint lacks it."""
        file, stored = self._location(name)
        data = None if self._read_ahead is None else self._read_ahead.view(name)
        entry = file.entries[stored]
        return RawTensor(name, entry.dtype, entry.shape, file.array(stored, data))

    def mapped_tensor(self, name: str) -> RawTensor:
        """The stored tensor as a view of the file, good for as long as anyone holds it."""
        file, stored = self._location(name)
        entry = file.entries[stored]
        return RawTensor(name, entry.dtype, entry.shape, file.array(stored))

    def storage_order(self, prefixes: Sequence[str]) -> list[int]:
        """Indices into `prefixes`, the names of experts, in the order that `read_ahead` reads them."""
        positions = self._expert_positions
        return sorted(range(len(prefixes)), key=lambda index: positions.get(prefixes[index], ("", 0)))

    def nbytes(self, name: str) -> int:
        """Stored bytes of one tensor."""
        file, stored = self._location(name)
        return file.entries[stored].nbytes

    def dtype(self, name: str) -> str:
        """The type one tensor is stored in, as the file spells it."""
        file, stored = self._location(name)
        return file.entries[stored].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        file, stored = self._location(name)
        return file.entries[stored].shape

    def where(self, name: str) -> str:
        """File and tensor, for error messages."""
        file, stored = self._location(name)
        return f"{file.path}: {stored}"

    @contextmanager
    def read_ahead(
        self, window_bytes: int = WINDOW_BYTES, *, skip: Callable[[str], bool] = lambda _: False
    ) -> Iterator[None]:
        """While a loader reads tensors layer by layer, read up to `window_bytes` of what comes next.

        `skip`: names of tensors that are not read.
        Memory grows by little more than the window as long as the loader calls `release`.
        """
        names = sorted((name for name in self._locations if not skip(name)), key=self._read_order)
        with ReadAhead([self._read_range(name) for name in names], window_bytes) as read_ahead:
            self._read_ahead = read_ahead
            try:
                yield
            finally:
                self._read_ahead = None

    def release(self, name: str) -> None:
        """The tensor is copied: its memory may go. It can be read again."""
        if self._read_ahead is not None:
            self._read_ahead.release(name)
        # Whole files and not single tensors: the kernel maps neighbours along with what is read, so the pages of a
        # released tensor come back when the one beside it is read.
        self._released_bytes += self.nbytes(name)
        if self._released_bytes >= RELEASE_BYTES:
            self._released_bytes = 0
            for file in self._files:
                file.release_pages()

    def _read_range(self, name: str) -> ReadRange:
        file, stored = self._location(name)
        entry = file.entries[stored]
        # Embeddings are used from the file, fused experts read in parts.
        keep = _is_embedding(name) or len(entry.shape) > 2
        return ReadRange(name, file.path, entry.begin, file.stored_bytes(stored), keep)

    def _read_order(self, name: str) -> tuple[int, tuple[str, int], str, int]:
        """Embedding, layer after layer, what follows the layers; in a layer the experts last, one after the other."""
        layer = _LAYER.search(name)
        stage = int(layer[1]) if layer else -1 if _is_embedding(name) else 1 << 62
        file, stored = self._location(name)
        expert = _EXPERT.match(name)
        position = ("", 0) if expert is None else self._expert_positions[expert[1]]
        return stage, position, file.path.name, file.entries[stored].begin

    @cached_property
    def _expert_positions(self) -> dict[str, tuple[str, int]]:
        """Where the first tensor of each expert lies: file and byte, by the name of the expert."""
        positions: dict[str, tuple[str, int]] = {}
        for name in self._locations:
            if (expert := _EXPERT.match(name)) is not None:
                file, stored = self._location(name)
                position = (file.path.name, file.entries[stored].begin)
                positions[expert[1]] = min(positions.get(expert[1], position), position)
        return positions

    def _location(self, name: str) -> tuple[SafetensorsFile, str]:
        try:
            return self._locations[name]
        except KeyError:
            fix = "check that config.json belongs to these weights"
            raise CheckpointError(str(self.path), f"a tensor {name!r}", "no such tensor", fix) from None


def _is_embedding(name: str) -> bool:
    return "embed" in name


def quantization_config(config: dict[str, Any]) -> Any:
    """`quantization_config`, which wrappers keep inside `text_config`; None for an unquantized checkpoint.

    `expert_dtype`, which DeepSeek-V4 has beside it, is put into it.
    """
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        found = source.get("quantization_config")
        if isinstance(found, dict) and "expert_dtype" in source:
            return {"expert_dtype": source["expert_dtype"]} | found
        if found is not None:
            return found
    return None


def _open_files(directory: Path) -> list[SafetensorsFile]:
    if (directory / SINGLE_FILE).exists():
        return [SafetensorsFile.open(directory / SINGLE_FILE)]
    if not (directory / INDEX_FILE).exists():
        raise _no_weights(directory)
    index = read_index(directory / INDEX_FILE)
    files = {shard: SafetensorsFile.open(directory / shard) for shard in sorted(set(index.values()))}
    for name, shard in index.items():
        if name not in files[shard].entries:
            raise CheckpointError(f"{directory / shard}: {name}", f"the tensor {INDEX_FILE} lists", "no such tensor")
    unlisted = sum(len(file.entries) for file in files.values()) - len(index)
    if unlisted > 0:
        logger.warning("%s: %d tensors of the shards are not in the index", directory, unlisted)
    return list(files.values())


def read_index(path: Path) -> dict[str, str]:
    """The files of the tensors that the index `path` lists, by stored name. CheckpointError for a faulty index."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(str(path), "weight_map to map tensor names to files", type(weight_map).__name__)
    for name, shard in weight_map.items():
        check_tensor_name(name, str(path))
        # A plain name cannot leave the directory. Symbolic links stay allowed: hub caches consist of them.
        plain = isinstance(shard, str) and Path(shard).name == shard and shard.isprintable() and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            got = repr(shard)[:200]
            raise CheckpointError(f"{path}: {name}", "the plain file name of a .safetensors shard", got)
    return weight_map


def _no_weights(directory: Path) -> CheckpointError:
    files = sorted(item.name for item in directory.iterdir() if item.is_file())
    unsafe = [name for name in files if Path(name).suffix in UNSAFE_SUFFIXES]
    if unsafe:
        fix = "convert the checkpoint to safetensors; pickled weights can run code and are never opened"
        return CheckpointError(str(directory), "safetensors weights", f"only {', '.join(unsafe[:5])}", fix)
    fix = "download the whole checkpoint directory"
    return CheckpointError(str(directory), f"{SINGLE_FILE} or {INDEX_FILE}", "neither", fix)


def _locate(files: list[SafetensorsFile]) -> dict[str, tuple[SafetensorsFile, str]]:
    locations: dict[str, tuple[SafetensorsFile, str]] = {}
    for file in files:
        for stored in file.entries:
            name = language_model_name(stored)
            if name in locations:
                other_file, other = locations[name]
                raise CheckpointError(
                    f"{file.path}: {stored}", "a tensor of one file", f"{other} in {other_file.path} too"
                )
            locations[name] = (file, stored)
    return locations


def language_model_name(stored: str) -> str:
    """The name that `Checkpoint` gives a stored tensor."""
    for prefix, replacement in WRAPPERS.items():
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored
