"""The routed experts of a model, read from GGUF files instead of its own checkpoint."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from proa.core.errors import CheckpointError, UnsupportedError
from proa.core.mapped_file import REDOWNLOAD
from proa.gguf.header import GgufEntry
from proa.gguf.model import GgufModel
from proa.native import _C
from proa.weights.expert_source import ExpertShape
from proa.weights.gguf_blocks import NATIVE, check_readable, common_format, first_bad_scale, is_finite, to_linear
from proa.weights.linear import RawLinear
from proa.weights.read_ahead import WINDOW_BYTES, ReadAhead, ReadRange

__all__ = ["GgufExperts"]

logger = logging.getLogger("proa.weights")

_RELEASE_BYTES = 256 << 20
_PROJECTIONS = ("gate", "up", "down")
_EXPERT_TENSOR = re.compile(
    r"blk\.(?P<layer>[0-9]{1,9})\.ffn_(?P<part>gate|up|down|gate_up)(?P<rest>_exps\..+|\.[0-9]+\..+)"
)


@dataclass(frozen=True, slots=True)
class _Slice:
    """One projection of one expert: `layer`, `expert`, "gate", "up" or "down"."""

    layer: int
    expert: int
    projection: str


class GgufExperts:
    """`blk.N.ffn_{gate,up,down}_exps.weight` of every layer, under the names of the model's own linears.

    All tensors are checked when it is made; blocks are read as linears are asked for, one expert at a time.
    """

    def __init__(
        self,
        model: GgufModel,
        prefixes: Mapping[int, str],
        names: Mapping[str, str],
        shape: ExpertShape,
        *,
        optional_layers: Collection[int] = (),
    ) -> None:
        """`prefixes`: of the experts by layer, e.g. `model.layers.3.mlp.experts`; `names`: of "gate", "up", "down".

        `optional_layers`: layers the file may hold beside those (MTP), which are not read. CheckpointError for a
        missing layer, a wrong number of experts or a wrong size; UnsupportedError for a type nobody can read.
        """
        self._model = model
        self._shape = shape
        self._prefixes = tuple(f"{prefix}." for prefix in prefixes.values())
        self._slices = {
            f"{prefix}.{expert}.{names[projection]}": _Slice(layer, expert, projection)
            for layer, prefix in prefixes.items()
            for expert in range(shape.num_experts)
            for projection in _PROJECTIONS
        }
        self._logged: set[tuple[str, str]] = set()
        self._read_ahead: ReadAhead | None = None
        # Copied experts whose pages are still mapped: first and last + 1 by tensor.
        self._copied: dict[str, tuple[int, int]] = {}
        self._copied_bytes = 0
        _check_layers(model, prefixes.keys(), optional_layers)
        for layer in prefixes:
            for projection in _PROJECTIONS:
                self._check_tensor(layer, projection)
        self._types = Counter(model.entry(_tensor(layer, p)).type.name for layer in prefixes for p in _PROJECTIONS)

    def __contains__(self, name: object) -> bool:
        return name in self._slices

    def replaces(self, tensor: str) -> bool:
        """Whether `tensor` of the model's own checkpoint belongs to the experts read from here."""
        return tensor.startswith(self._prefixes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the blocks of all experts in the files."""
        return sum(self._blocks(item).nbytes for item in self._slices.values())

    @property
    def max_packed_bytes(self) -> int:
        """What all experts take once loaded. Reads no weights."""
        return sum(
            _C.packed_bytes(self._format(item.layer, item.projection), *self._shape.of(item.projection))
            for item in self._slices.values()
        )

    def has_bias(self, name: str) -> bool:
        """Never: a file with biases is refused when it is opened."""
        assert name in self._slices
        return False

    def linear(self, name: str, shape: tuple[int, int]) -> RawLinear:
        """The linear `name`, `(out, in)` = `shape`, in its own format or the one that gate and up have to share."""
        item = self._slices[name]
        tensor = self._model.entry(_tensor(item.layer, item.projection))
        if shape != self._shape.of(item.projection):
            raise CheckpointError(self._model.where(tensor.name), f"experts of shape {list(shape)}", self._shape)
        blocks = self._blocks(item)
        read = None if self._read_ahead is None else self._read_ahead.view(name)
        if read is not None:
            blocks = read.reshape(blocks.shape)
        if (bad := first_bad_scale(tensor.type, blocks)) is not None:
            raise self._bad_scale(tensor, f"inf or NaN in expert {item.expert}, row {bad[0]}, block {bad[1]}")
        weight_format = self._format(item.layer, item.projection)
        self._log(tensor.type.name, weight_format)
        linear = to_linear(tensor.type, blocks, weight_format)
        if tensor.type.name not in NATIVE and not is_finite(linear):
            raise self._bad_scale(tensor, f"inf or NaN in expert {item.expert}")
        return linear

    def _bad_scale(self, tensor: GgufEntry, got: str) -> CheckpointError:
        return CheckpointError(self._model.where(tensor.name), "finite scales", got, REDOWNLOAD)

    def packed(self, name: str) -> int:
        """The linear `name` is copied, its pages may leave this process: returns the stored bytes it had."""
        if self._read_ahead is not None:
            self._read_ahead.release(name)
        item = self._slices[name]
        num_bytes = self._blocks(item).nbytes
        tensor = _tensor(item.layer, item.projection)
        first, end = self._copied.get(tensor, (item.expert, item.expert))
        self._copied[tensor] = min(first, item.expert), max(end, item.expert + 1)
        # Many at a time: the kernel maps neighbours along with what is read, so the pages of one expert would come
        # back when the next is read.
        self._copied_bytes += num_bytes
        if self._copied_bytes >= _RELEASE_BYTES:
            self._release_copied()
        return num_bytes

    @contextmanager
    def read_ahead(self, window_bytes: int = WINDOW_BYTES) -> Iterator[None]:
        """While a loader reads expert after expert, read up to `window_bytes` of what comes next."""
        with ReadAhead([self._read_range(name) for name in self._slices], window_bytes) as read_ahead:
            self._read_ahead = read_ahead
            try:
                yield
            finally:
                self._read_ahead = None
                self._release_copied()

    def _read_range(self, name: str) -> ReadRange:
        item = self._slices[name]
        blocks = self._blocks(item).reshape(-1)
        path, begin = self._model.offset(_tensor(item.layer, item.projection))
        return ReadRange(name, path, begin + item.expert * blocks.nbytes, blocks)

    def _release_copied(self) -> None:
        for tensor, (first, end) in self._copied.items():
            self._model.release(tensor, slice(first, end))
        self._copied.clear()
        self._copied_bytes = 0

    def _blocks(self, item: _Slice) -> np.ndarray:
        """uint8 `[out, row bytes]`, a view of the file."""
        blocks: np.ndarray = self._model.tensor(_tensor(item.layer, item.projection)).data[item.expert]
        return blocks

    def _format(self, layer: int, projection: str) -> str:
        """Gate and up of a layer are multiplied together and need one format; down has its own."""
        shared = ("down",) if projection == "down" else ("gate", "up")
        return common_format(self._model.entry(_tensor(layer, name)).type for name in shared)

    def _log(self, type_name: str, weight_format: str) -> None:
        if (type_name, weight_format) in self._logged:
            return
        self._logged.add((type_name, weight_format))
        native = NATIVE.get(type_name)
        if native is not None and native.format == weight_format:
            how = "exactly"
        elif weight_format == "f32":
            how = "dequantized, as gate and up of a layer are of two types, one of them float32 or float16"
        elif native is not None:
            how = "rounded, as gate and up of a layer are of two types"
        else:
            how = "rounded: it has no kernel of its own yet"
        count = self._types[type_name]
        logger.info(
            "%s: experts in %s (%d tensors) load as %s, %s", self._model.path, type_name, count, weight_format, how
        )

    def _check_tensor(self, layer: int, projection: str) -> None:
        name = _tensor(layer, projection)
        fix = "name the GGUF file of the same model, and all files of a split one"
        if name not in self._model:
            what = f"experts of every layer config.json gives some: a tensor {name}"
            raise CheckpointError(str(self._model.path), what, "no such tensor", fix)
        entry = self._model.entry(name)
        expected = (self._shape.num_experts, *self._shape.of(projection))
        if entry.shape != expected:
            what = f"{expected[0]} experts of {expected[1]} x {expected[2]}, as config.json says"
            raise CheckpointError(self._model.where(name), what, f"shape {list(entry.shape)}", fix)
        check_readable(entry.type, self._model.where(name))


def _tensor(layer: int, projection: str) -> str:
    return f"blk.{layer}.ffn_{projection}_exps.weight"


def _check_layers(model: GgufModel, layers: Collection[int], optional: Collection[int]) -> None:
    """Every expert tensor of the files is one that is read, or of an optional layer."""
    for name in model.names:
        match = _EXPERT_TENSOR.fullmatch(name)
        if match is None or int(match["layer"]) in optional:
            continue
        expected = [_tensor(int(match["layer"]), projection) for projection in _PROJECTIONS]
        if name not in expected:
            what = "experts as ffn_gate_exps.weight, ffn_up_exps.weight and ffn_down_exps.weight alone"
            fix = "convert the model again with a current llama.cpp"
            raise UnsupportedError(model.where(name), what, f"a tensor {name}", fix)
        if int(match["layer"]) not in layers:
            what = f"experts in the layers config.json gives some ({_ranges(layers)})"
            fix = "name the GGUF file of the same model"
            raise CheckpointError(model.where(name), what, f"layer {match['layer']}", fix)


def _ranges(layers: Collection[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)
