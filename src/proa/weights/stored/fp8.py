"""e4m3 weights `weight` F8_E4M3 `[out, in]`, told apart by the tensor of their scales.

mxfp8: E8M0 or U8 `[out, in / 32]` (MiniMax-M3, compressed-tensors). Blocks: F32, BF16, F16, E8M0 or U8
`[ceil(out / 128), ceil(in / 128)]` (DeepSeek; V4 has E8M0). Channels: F32, BF16 or F16 `[out, 1]` or `[out]`
(compressed-tensors float-quantized: GLM-4.x-FP8).
"""

from __future__ import annotations

from proa.core.errors import CheckpointError
from proa.weights.float_codes import f32_from_e8m0
from proa.weights.formats import ROW_FORMATS
from proa.weights.quantization import MX_GROUP
from proa.weights.raw_linear import RawLinear
from proa.weights.stored.tensors import LinearTensors, Storage, f32_values

__all__ = ["STORAGES"]

_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
_SUFFIXES = ("weight", *_SCALE_NAMES, "input_scale")
_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("F8_E8M0", "U8")


def _matches(tensors: LinearTensors) -> bool:
    return tensors.dtype("weight") == "F8_E4M3"


def _scale_shape(tensors: LinearTensors) -> tuple[int, ...]:
    name = f"{tensors.prefix}.{tensors.first(*_SCALE_NAMES)}"
    return tensors.checkpoint.shape(name) if name in tensors.checkpoint else ()


def _is_mxfp8(tensors: LinearTensors) -> bool:
    if not _matches(tensors) or tensors.dtype(tensors.first(*_SCALE_NAMES)) not in _POWERS:
        return False
    # The scales of blocks have 128 times fewer rows than the weight.
    rows = tensors.checkpoint.shape(f"{tensors.prefix}.weight")[:1]
    return _scale_shape(tensors)[:1] == rows


def _is_channel(tensors: LinearTensors) -> bool:
    if not _matches(tensors) or tensors.dtype("weight_scale") not in _FLOATS or "weight_scale_inv" in tensors:
        return False
    shape = _scale_shape(tensors)
    rows = tensors.checkpoint.shape(f"{tensors.prefix}.weight")[:1]
    return len(shape) < 2 or shape == (*rows, 1)


def _read_mxfp8(tensors: LinearTensors) -> RawLinear:
    weight, shape = tensors.read_matrix("weight", ("F8_E4M3",))
    if shape[1] % MX_GROUP:
        raise CheckpointError(tensors.where("weight"), f"input features in groups of {MX_GROUP}", list(shape))
    scale = tensors.read_scales(tensors.first(*_SCALE_NAMES), _POWERS, [(shape[0], shape[1] // MX_GROUP)])
    return RawLinear("mxfp8", *shape, weight.data, scale.data)


def _read_channel(tensors: LinearTensors) -> RawLinear:
    weight, shape = tensors.read_matrix("weight", ("F8_E4M3",))
    scale = tensors.read_scales("weight_scale", _FLOATS, [(shape[0], 1), (shape[0],)])
    return RawLinear("fp8_channel", *shape, weight.data, f32_values(scale).reshape(-1))


def _read_block(tensors: LinearTensors) -> RawLinear:
    weight, shape = tensors.read_matrix("weight", ("F8_E4M3",))
    # A ceil grid of fixed 128 x 128 blocks; dividing the shapes would guess a wrong block size at ragged edges.
    grid = ROW_FORMATS["fp8_block128"].scale_shape(*shape)
    scale = tensors.read_scales(tensors.first(*_SCALE_NAMES), (*_FLOATS, *_POWERS), [grid])
    scales = f32_from_e8m0(scale.data) if scale.dtype in _POWERS else f32_values(scale)
    return RawLinear("fp8_block128", *shape, weight.data, scales)


STORAGES = (
    Storage(_SUFFIXES, _is_mxfp8, _read_mxfp8),
    Storage(_SUFFIXES, _is_channel, _read_channel),
    Storage(_SUFFIXES, _matches, _read_block, "fp8_block128"),
)
