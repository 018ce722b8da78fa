"""compressed-tensors "pack-quantized" int4: integers along the input, symmetric, a scale per group.

`weight_packed` I32 `[out, in / 8]` or U8 `[out, in / 2]`, `weight_scale` BF16, F16 or F32 `[out, in / group]`,
`weight_shape` I64 or I32 `[2]` (may be missing).
"""

from __future__ import annotations

import numpy as np

from proa.core.errors import CheckpointError
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.checkpoint import RawTensor
from proa.weights.quantization import INT4_GROUPS
from proa.weights.raw_linear import RawLinear
from proa.weights.stored.tensors import LinearTensors, Storage

__all__ = ["STORAGE", "int4_linear"]

_PER_ITEM = {"I32": 8, "U8": 2}


def int4_linear(tensors: LinearTensors, shape: tuple[int, int], data: np.ndarray, scale: RawTensor) -> RawLinear:
    """The linear of nibbles `data` uint8 `[out, in / 2]` and `scale` `[out, in / group]`: its type names the format."""
    group = shape[1] // scale.shape[1]
    if scale.dtype == "BF16":
        return RawLinear(f"int4_g{group}", *shape, data, scale.data)
    if scale.dtype == "F16":
        return RawLinear(f"int4_g{group}_f16", *shape, data, scale.data.view(np.uint16))
    rounded = bf16_from_f32(scale.data)
    if not np.array_equal(f32_from_bf16(rounded), scale.data):
        raise tensors.unsupported(scale.name.rsplit(".", 1)[1], "int4 scales of dtype F32 that bf16 cannot hold")
    return RawLinear(f"int4_g{group}", *shape, data, rounded)


def _read(tensors: LinearTensors) -> RawLinear:
    if "weight_zero_point" in tensors:
        raise tensors.unsupported("weight_zero_point", "int4 with zero points (asymmetric)")
    if "weight_g_idx" in tensors:
        raise tensors.unsupported("weight_g_idx", "int4 with reordered groups (actorder)")
    shape = _declared_shape(tensors) if "weight_shape" in tensors else tensors.shape
    dtype = tensors.dtype("weight_packed") or ""
    packed, shape = LinearTensors(tensors.checkpoint, tensors.prefix, shape).read_matrix(
        "weight_packed", tuple(_PER_ITEM), _PER_ITEM.get(dtype, 1)
    )
    groups = [group for group in INT4_GROUPS if shape[1] % group == 0]
    if not groups:
        got = f"[{shape[0]}, {shape[1]}]"
        raise CheckpointError(tensors.where("weight_packed"), f"input features in groups of {INT4_GROUPS[0]}", got)
    shapes = [(shape[0], shape[1] // group) for group in groups]
    scale = tensors.read_scales("weight_scale", ("BF16", "F16", "F32"), shapes)
    # Eight nibbles per little-endian int32, least significant first: the bytes in order are the pairs in order.
    return int4_linear(tensors, shape, packed.data.view(np.uint8), scale)


def _declared_shape(tensors: LinearTensors) -> tuple[int, int]:
    declared = tensors.read("weight_shape", ("I64", "I32"))
    if declared.shape != (2,):
        raise CheckpointError(tensors.where("weight_shape"), "shape [2]", list(declared.shape))
    shape = int(declared.data[0]), int(declared.data[1])
    if min(shape) <= 0 or tensors.shape not in (None, shape):
        expected = "two positive sizes" if tensors.shape is None else f"a weight of shape {list(tensors.shape)}"
        raise CheckpointError(tensors.where("weight_shape"), expected, list(shape))
    return shape


STORAGE = Storage(
    ("weight_packed", "weight_scale", "weight_shape"),
    lambda tensors: "weight_packed" in tensors,
    _read,
)
