"""e2m1 weights, two to a byte, the even column in the low nibble: `[out, in / 2]`.

mxfp4: `weight_packed` U8 with `weight_scale` (compressed-tensors), or `weight` I8, U8 or F4 with `scale` (DeepSeek-V4);
E8M0 or U8 scales `[out, in / 32]`. nvfp4: scales F8_E4M3 `[out, in / 16]` and one F32 for the tensor, which divides as
`weight_global_scale` beside `weight_packed` (compressed-tensors) and multiplies as `weight_scale_2` beside `weight`
(ModelOpt).
"""

from __future__ import annotations

import math

import numpy as np

from proa.core.errors import CheckpointError
from proa.weights.checkpoint import RawTensor
from proa.weights.quantization import MX_GROUP
from proa.weights.raw_linear import RawLinear
from proa.weights.stored.tensors import LinearTensors, Storage

__all__ = ["STORAGES"]

_NV_GROUP = 16
_DATA_NAMES = ("weight_packed", "weight")
_SCALE_NAMES = ("weight_scale", "scale", "weight_scale_inv")
_CODES = ("U8", "I8", "F4")
_POWERS = ("F8_E8M0", "U8")


def _is_mxfp4(tensors: LinearTensors) -> bool:
    return (
        tensors.dtype(tensors.first(*_DATA_NAMES)) in _CODES and tensors.dtype(tensors.first(*_SCALE_NAMES)) in _POWERS
    )


def _is_nvfp4(tensors: LinearTensors) -> bool:
    return tensors.dtype(tensors.first(*_DATA_NAMES)) in _CODES and tensors.dtype("weight_scale") == "F8_E4M3"


def _read_codes(tensors: LinearTensors, group: int) -> tuple[np.ndarray, tuple[int, int]]:
    name = tensors.first(*_DATA_NAMES)
    packed, shape = tensors.read_matrix(name, _CODES, 1 if tensors.dtype(name) == "F4" else 2)
    if shape[1] % group:
        raise CheckpointError(tensors.where(name), f"input features in groups of {group}", list(shape))
    return packed.data.view(np.uint8), shape


def _read_mxfp4(tensors: LinearTensors) -> RawLinear:
    data, shape = _read_codes(tensors, MX_GROUP)
    scale = tensors.read_scales(tensors.first(*_SCALE_NAMES), _POWERS, [(shape[0], shape[1] // MX_GROUP)])
    return RawLinear("mxfp4", *shape, data, scale.data)


def _read_nvfp4(tensors: LinearTensors) -> RawLinear:
    data, shape = _read_codes(tensors, _NV_GROUP)
    scale = tensors.read_scales("weight_scale", ("F8_E4M3",), [(shape[0], shape[1] // _NV_GROUP)])
    if "weight_packed" in tensors:
        divisor = _read_global(tensors, "weight_global_scale")
        return RawLinear("nvfp4", *shape, data, scale.data, float(np.float32(1) / divisor))
    return RawLinear("nvfp4", *shape, data, scale.data, float(_read_global(tensors, "weight_scale_2")))


def _read_global(tensors: LinearTensors, suffix: str) -> np.float32:
    tensor: RawTensor = tensors.read_scales(suffix, ("F32",), [(), (1,)])
    value = np.float32(tensor.data.reshape(-1)[0])
    # Its inverse is used too: that of a subnormal would be inf.
    if value <= 0 or not math.isfinite(np.float32(1) / value):
        raise CheckpointError(tensors.where(suffix), "a normal number above zero", float(value))
    return value


_NVFP4_SUFFIXES = (
    *("weight_packed", "weight_global_scale", "input_global_scale"),
    *("weight", "weight_scale_2", "input_scale"),
    "weight_scale",
)

STORAGES = (
    Storage((*_DATA_NAMES, *_SCALE_NAMES), _is_mxfp4, _read_mxfp4),
    Storage(_NVFP4_SUFFIXES, _is_nvfp4, _read_nvfp4, "nvfp4"),
)
