"""The routed experts of a layer under every naming checkpoints have: one tensor per expert, or all in one.

An expert is three linears: gate and up `[intermediate, hidden]`, down `[hidden, intermediate]`. `NAMINGS` has one entry
per naming; what it is called below the experts' prefix decides. Slices are views of the file where its layout allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from proa.core.errors import CheckpointError
from proa.weights.checkpoint import Checkpoint, RawTensor
from proa.weights.linear import RawLinear, check_declared, linear_tensor_names, read_array, read_linear
from proa.weights.quantization import MX_GROUP
from proa.weights.stored.tensors import check_finite, f32_values

__all__ = [
    "NAMINGS",
    "ExpertNaming",
    "ExpertWeights",
    "StoredExperts",
    "check_num_experts",
    "expert_linear_tensors",
    "read_expert_linear",
    "read_experts",
]

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")

# Where a layer keeps its experts: DeepSeek, GLM, Qwen, gpt-oss; Mixtral and MiniMax; DeepSeek-V4.
_BLOCKS = ("mlp", "block_sparse_moe", "ffn")
_LAYERS = ("model.layers", "layers")
_OWN_NAMES: dict[str, Projection] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_EXPERT_LINEAR = re.compile(rf"(.*\.experts)\.([0-9]{{1,9}})\.({'|'.join(_OWN_NAMES)})")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The three linears of an expert, with their biases where the checkpoint has any."""

    gate: RawLinear
    up: RawLinear
    down: RawLinear


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear of one expert: `prefix` ends in `.experts`; `shape` is the `(out, in)` the model expects."""

    checkpoint: Checkpoint
    prefix: str
    expert: int
    projection: Projection
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ExpertNaming:
    """`key`: name below the prefix of a tensor that tells this naming, `{}` for the first suffix of a linear.

    `tensors` lists the tensors a linear is read from. `fused`: they hold all experts.
    """

    key: str
    fused: bool
    read: Callable[[ExpertLinear], RawLinear]
    tensors: Callable[[ExpertLinear], list[str]]


def read_experts(
    checkpoint: Checkpoint, layer: int, *, num_experts: int, hidden: int, intermediate: int
) -> list[ExpertWeights]:
    """All experts of a layer, whatever it calls them. CheckpointError for a layer without, or other sizes."""
    experts = StoredExperts.find(checkpoint, layer, num_experts=num_experts, hidden=hidden, intermediate=intermediate)
    return [experts.weights(expert) for expert in range(num_experts)]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The experts below one prefix, such as `model.layers.3.mlp.experts`."""

    checkpoint: Checkpoint
    prefix: str
    naming: ExpertNaming
    hidden: int
    intermediate: int

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, layer: int, *, num_experts: int, hidden: int, intermediate: int
    ) -> StoredExperts:
        """Looks at names only, and for fused tensors at the number of experts. CheckpointError for a layer without."""
        for prefix in (f"{layers}.{layer}.{block}.experts" for layers in _LAYERS for block in _BLOCKS):
            naming = find_naming(checkpoint, prefix)
            if naming is not None:
                check_num_experts(checkpoint, prefix, num_experts)
                return cls(checkpoint, prefix, naming, hidden, intermediate)
        raise CheckpointError(str(checkpoint.path), f"routed experts in layer {layer}", "none under a name proa knows")

    def linear(self, expert: int, projection: Projection) -> ExpertLinear:
        shape = (self.intermediate, self.hidden)
        return ExpertLinear(
            self.checkpoint, self.prefix, expert, projection, shape[::-1] if projection == "down" else shape
        )

    def weights(self, expert: int) -> ExpertWeights:
        return ExpertWeights(*(self.naming.read(self.linear(expert, projection)) for projection in PROJECTIONS))

    def tensors(self, expert: int) -> list[str]:
        """Names of all tensors that `weights` reads."""
        return [name for projection in PROJECTIONS for name in self.naming.tensors(self.linear(expert, projection))]


def find_naming(checkpoint: Checkpoint, prefix: str) -> ExpertNaming | None:
    """The naming of the experts below `prefix`; None when there are none."""
    return next((naming for naming in NAMINGS if _has(checkpoint, f"{prefix}.{naming.key}")), None)


def check_num_experts(checkpoint: Checkpoint, prefix: str, num_experts: int) -> None:
    """CheckpointError when tensors below `prefix` hold another number of experts. Missing ones show when read."""
    naming = find_naming(checkpoint, prefix)
    if naming is None or not naming.fused:
        return
    for projection in PROJECTIONS:
        for name in naming.tensors(ExpertLinear(checkpoint, prefix, 0, projection, (1, 1))):
            shape = checkpoint.shape(name)
            if shape[:1] != (num_experts,):
                raise CheckpointError(checkpoint.where(name), f"{num_experts} experts", f"shape {list(shape)}")


def read_expert_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> RawLinear | None:
    """The linear a model calls `name`, e.g. `model.layers.3.mlp.experts.5.up_proj`, under whatever name it is stored.

    None when that is no name of an expert's linear, or the checkpoint has no experts there.
    """
    found = _find_expert_linear(checkpoint, name, shape)
    return None if found is None else found[0].read(found[1])


def expert_linear_tensors(checkpoint: Checkpoint, name: str) -> list[str]:
    """Names of the tensors that `read_expert_linear` reads for `name`; fused ones hold other linears too."""
    found = _find_expert_linear(checkpoint, name, (1, 1))
    return [] if found is None else found[0].tensors(found[1])


def _find_expert_linear(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int]
) -> tuple[ExpertNaming, ExpertLinear] | None:
    match = _EXPERT_LINEAR.fullmatch(name)
    naming = None if match is None else find_naming(checkpoint, match[1])
    if match is None or naming is None:
        return None
    return naming, ExpertLinear(checkpoint, match[1], int(match[2]), _OWN_NAMES[match[3]], shape)


def _has(checkpoint: Checkpoint, key: str) -> bool:
    if key.endswith(".{}"):
        return any(key.format(suffix) in checkpoint for suffix in ("weight", "weight_packed", "qweight"))
    return key in checkpoint


def _per_expert(gate: str, up: str, down: str) -> ExpertNaming:
    """`{prefix}.{expert}.{gate}` and so on, each stored as any linear may be, with its bias beside it."""
    names = {"gate": gate, "up": up, "down": down}

    def name(linear: ExpertLinear) -> str:
        return f"{linear.prefix}.{linear.expert}.{names[linear.projection]}"

    def read(linear: ExpertLinear) -> RawLinear:
        raw = read_linear(linear.checkpoint, name(linear), linear.shape)
        bias = f"{name(linear)}.bias"
        if bias not in linear.checkpoint:
            return raw
        return replace(raw, bias=read_array(linear.checkpoint, bias, linear.shape[:1]))

    def tensors(linear: ExpertLinear) -> list[str]:
        return linear_tensor_names(linear.checkpoint, name(linear)) + _present(linear, f"{name(linear)}.bias")

    return ExpertNaming(f"0.{gate}.{{}}", False, read, tensors)


def _tensor_name(linear: ExpertLinear) -> str:
    return f"{linear.prefix}.{'down_proj' if linear.projection == 'down' else 'gate_up_proj'}"


def _fused_tensors(*suffixes: str) -> Callable[[ExpertLinear], list[str]]:
    return lambda linear: _present(linear, *(_tensor_name(linear) + suffix for suffix in suffixes))


def _present(linear: ExpertLinear, *names: str) -> list[str]:
    return [name for name in names if name in linear.checkpoint]


def _read_halves(linear: ExpertLinear) -> RawLinear:
    """`gate_up_proj` `[E, 2 * intermediate, hidden]`, gate rows before up rows; `down_proj` `[E, out, in]`."""
    out_features, in_features = linear.shape
    tensor = _slice(linear, _tensor_name(linear), tuple(_PLAIN), (_stacked_rows(linear), in_features))
    first = out_features if linear.projection == "up" else 0
    return _plain(tensor, tensor.data[first : first + out_features])


def _read_transposed(linear: ExpertLinear) -> RawLinear:
    """gpt-oss: `gate_up_proj` `[E, in, 2 * out]`, gate and up columns in turn, and `down_proj` `[E, in, out]`."""
    name = _tensor_name(linear)
    tensor = _slice(linear, name, tuple(_PLAIN), (linear.shape[1], _stacked_rows(linear)))
    rows = np.ascontiguousarray(tensor.data.T[_in_turn(linear)])
    return replace(_plain(tensor, rows), bias=_read_bias(linear))


def _read_blocks(linear: ExpertLinear) -> RawLinear:
    """gpt-oss: `_blocks` U8 `[E, out, in / 32, 16]` and `_scales` U8 `[E, out, in / 32]`, gate and up rows in turn."""
    name, (out_features, in_features) = _tensor_name(linear), linear.shape
    groups = in_features // MX_GROUP
    if in_features % MX_GROUP:
        raise CheckpointError(linear.checkpoint.where(f"{name}_blocks"), f"inputs in groups of {MX_GROUP}", in_features)
    blocks = _slice(linear, f"{name}_blocks", ("U8",), (_stacked_rows(linear), groups, MX_GROUP // 2))
    scales = _slice(linear, f"{name}_scales", ("U8", "F8_E8M0"), (_stacked_rows(linear), groups))
    check_finite(linear.checkpoint, scales)
    turn = _in_turn(linear)
    data = np.ascontiguousarray(blocks.data[turn]).reshape(out_features, in_features // 2)
    check_declared(linear.checkpoint, f"{name}_blocks", "mxfp4")
    rows = np.ascontiguousarray(scales.data[turn])
    return RawLinear("mxfp4", out_features, in_features, data, rows, bias=_read_bias(linear))


_PLAIN = {"F32": "f32", "BF16": "bf16", "F16": "f16"}

NAMINGS: tuple[ExpertNaming, ...] = (
    _per_expert("gate_proj", "up_proj", "down_proj"),
    _per_expert("w1", "w3", "w2"),
    ExpertNaming("gate_up_proj_blocks", True, _read_blocks, _fused_tensors("_blocks", "_scales", "_bias")),
    # gpt-oss in bf16 is told by its biases: the shapes may be those of the next naming too.
    ExpertNaming("gate_up_proj_bias", True, _read_transposed, _fused_tensors("", "_bias")),
    ExpertNaming("gate_up_proj", True, _read_halves, _fused_tensors("")),
)


def _stacked_rows(linear: ExpertLinear) -> int:
    return linear.shape[0] * (1 if linear.projection == "down" else 2)


def _in_turn(linear: ExpertLinear) -> slice:
    """Rows of the projection where gate and up alternate."""
    return slice(None) if linear.projection == "down" else slice(int(linear.projection == "up"), None, 2)


def _slice(linear: ExpertLinear, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> RawTensor:
    """The expert's part, of `shape`, of a tensor `[E, *shape]`."""
    tensor = linear.checkpoint.tensor(name)
    if tensor.dtype not in dtypes:
        raise CheckpointError(linear.checkpoint.where(name), f"dtype {' or '.join(dtypes)}", tensor.dtype)
    if tensor.shape[1:] != shape or linear.expert >= tensor.shape[0]:
        expected = f"shape [{linear.expert + 1} or more, {', '.join(map(str, shape))}]"
        raise CheckpointError(linear.checkpoint.where(name), expected, list(tensor.shape))
    return RawTensor(name, tensor.dtype, shape, tensor.data[linear.expert])


def _plain(tensor: RawTensor, rows: np.ndarray) -> RawLinear:
    data = rows.view(np.uint16) if tensor.dtype == "F16" else rows
    return RawLinear(_PLAIN[tensor.dtype], rows.shape[0], rows.shape[1], data, None)


def _read_bias(linear: ExpertLinear) -> np.ndarray | None:
    """gpt-oss: `_bias` `[E, out]`, gate and up in turn."""
    name = f"{_tensor_name(linear)}_bias"
    if name not in linear.checkpoint:
        return None
    tensor = _slice(linear, name, tuple(_PLAIN), (_stacked_rows(linear),))
    return np.array(f32_values(tensor)[_in_turn(linear)])
