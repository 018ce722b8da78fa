"""Linears and plain arrays in their stored format, checked against the shape the model expects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proa.core.errors import CheckpointError, UnsupportedError
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.checkpoint import Checkpoint, RawTensor
from proa.weights.quantization import FP8_BLOCK, INT4_GROUP, SUPPORTED_QUANTIZATION

__all__ = ["RawLinear", "linear_tensor_names", "read_array", "read_linear"]

_PLAIN_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f32"}
# Suffixes of formats proa lacks, looked for only to name them in the error.
_FOREIGN_SUFFIXES = {"qweight": "GPTQ or AWQ", "weight_blocks": "MXFP4 blocks", "blocks": "MXFP4 blocks"}


@dataclass(frozen=True, slots=True)
class RawLinear:
    """A weight `[out, in]` as stored, in the arrays `proa.native` packs.

    format               data                           scales
    f32, bf16, f16       float32, uint16, uint16        None
    int4_gG              uint8 [out, in / 2]            uint16 (bf16) [out, in / G]       G = 32, 64 or 128
    int4_gG_f16          uint8 [out, in / 2]            uint16 (fp16) [out, in / G]
    int8_g128            int8 [out, in]                 uint16 (bf16) [out, ceil(in / 128)]
    int8_g32_f16         int8 [out, in]                 uint16 (fp16) [out, in / 32]
    fp8_block128         uint8 (e4m3) [out, in]         float32 [ceil(out / 128), ceil(in / 128)]
    fp8_channel          uint8 (e4m3) [out, in]         float32 [out]
    mxfp8                uint8 (e4m3) [out, in]         uint8 (e8m0) [out, in / 32]
    mxfp4                uint8 (e2m1) [out, in / 2]     uint8 (e8m0) [out, in / 32]
    nvfp4                uint8 (e2m1) [out, in / 2]     uint8 (e4m3) [out, in / 16]

    Of two nibbles in byte b the low one is element 2b, the high one 2b + 1; an int4 nibble u is the integer u - 8.
    A value is its element times the scale of its group; nvfp4 multiplies by `global_scale` too, all others have 1.

    layout "ggml": `data` uint8 [out, bytes of a row], the blocks of a GGUF file; no scales.
    bias: float32 [out], added to the product; None for none.
    """

    format: str
    out_features: int
    in_features: int
    data: np.ndarray
    scales: np.ndarray | None
    global_scale: float = 1.0
    layout: str = "rows"
    bias: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def read_linear(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int] | None = None) -> RawLinear:
    """The linear `prefix` (without `.weight`), its format detected from the tensors present.

    `shape` is the `(out, in)` the model expects; None accepts any. CheckpointError for a missing tensor, another
    shape or a scale that does not fit; UnsupportedError for a storage format proa lacks.
    """
    if f"{prefix}.weight_packed" in checkpoint:
        return _read_int4(checkpoint, prefix, shape)
    if f"{prefix}.weight" not in checkpoint:
        for suffix, name in _FOREIGN_SUFFIXES.items():
            if f"{prefix}.{suffix}" in checkpoint:
                raise _unsupported(checkpoint.where(f"{prefix}.{suffix}"), name)
    weight = checkpoint.tensor(f"{prefix}.weight")
    out_features, in_features = _check_shape(checkpoint, weight, shape)
    if weight.dtype == "F8_E4M3":
        scales = _read_fp8_scales(checkpoint, prefix, (out_features, in_features))
        return RawLinear("fp8_block128", out_features, in_features, weight.data, scales)
    if weight.dtype not in _PLAIN_FORMATS:
        raise _unsupported(checkpoint.where(weight.name), f"weights of dtype {weight.dtype}")
    data = weight.data.astype(np.float32) if weight.dtype == "F16" else weight.data
    return RawLinear(_PLAIN_FORMATS[weight.dtype], out_features, in_features, data, None)


def linear_tensor_names(checkpoint: Checkpoint, prefix: str) -> list[str]:
    """Names of the stored tensors `read_linear` reads for `prefix`."""
    suffixes = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape")
    return [f"{prefix}.{suffix}" for suffix in suffixes if f"{prefix}.{suffix}" in checkpoint]


def read_array(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float tensor as a float32 copy `[*shape]`. CheckpointError for another shape or a dtype that is no float."""
    tensor = checkpoint.tensor(name)
    if tensor.shape != shape:
        raise CheckpointError(checkpoint.where(name), f"shape {list(shape)}", list(tensor.shape))
    return _to_f32(checkpoint, tensor)


def _read_int4(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int] | None) -> RawLinear:
    packed = checkpoint.tensor(f"{prefix}.weight_packed")
    declared = checkpoint.tensor(f"{prefix}.weight_shape")
    if declared.dtype not in ("I64", "I32") or declared.shape != (2,):
        got = f"{declared.dtype} {list(declared.shape)}"
        raise CheckpointError(checkpoint.where(declared.name), "I64 or I32 of shape [2]", got)
    out_features, in_features = (int(size) for size in declared.data)
    if shape is not None and (out_features, in_features) != shape:
        got = f"[{out_features}, {in_features}]"
        raise CheckpointError(checkpoint.where(declared.name), f"a weight of shape {list(shape)}", got)
    if out_features <= 0 or in_features <= 0 or in_features % INT4_GROUP:
        got = f"[{out_features}, {in_features}]"
        raise CheckpointError(checkpoint.where(declared.name), f"input features in groups of {INT4_GROUP}", got)
    if packed.dtype != "I32" or packed.shape != (out_features, in_features // 8):
        got = f"{packed.dtype} {list(packed.shape)}"
        expected = f"I32 of shape {[out_features, in_features // 8]}"
        raise CheckpointError(checkpoint.where(packed.name), expected, got)
    scale = checkpoint.tensor(f"{prefix}.weight_scale")
    if scale.shape != (out_features, in_features // INT4_GROUP):
        expected = f"shape {[out_features, in_features // INT4_GROUP]}"
        raise CheckpointError(checkpoint.where(scale.name), expected, list(scale.shape))
    # Eight nibbles per little-endian int32, least significant first: the bytes in order are the pairs in order.
    data = packed.data.view(np.uint8)
    return RawLinear("int4_g32", out_features, in_features, data, _to_bf16(checkpoint, scale))


def _read_fp8_scales(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> np.ndarray:
    if f"{prefix}.weight_scale_inv" not in checkpoint and f"{prefix}.weight_scale" in checkpoint:
        raise _unsupported(checkpoint.where(f"{prefix}.weight_scale"), "fp8 with per-channel or per-tensor scales")
    scale = checkpoint.tensor(f"{prefix}.weight_scale_inv")
    # A ceil grid of fixed 128 x 128 blocks; dividing the shapes would guess a wrong block size at ragged edges.
    grid = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    if scale.shape != grid:
        expected = f"shape {list(grid)} for a weight {list(shape)} in blocks of {FP8_BLOCK} x {FP8_BLOCK}"
        raise CheckpointError(checkpoint.where(scale.name), expected, list(scale.shape))
    return scale.data if scale.dtype == "F32" else _to_f32(checkpoint, scale)


def _check_shape(checkpoint: Checkpoint, weight: RawTensor, shape: tuple[int, int] | None) -> tuple[int, int]:
    if len(weight.shape) != 2 or 0 in weight.shape or (shape is not None and weight.shape != shape):
        expected = "a matrix" if shape is None else f"shape {list(shape)}"
        raise CheckpointError(checkpoint.where(weight.name), expected, list(weight.shape))
    return weight.shape[0], weight.shape[1]


def _to_f32(checkpoint: Checkpoint, tensor: RawTensor) -> np.ndarray:
    if tensor.dtype == "BF16":
        return f32_from_bf16(tensor.data)
    if tensor.dtype in ("F32", "F16"):
        return tensor.data.astype(np.float32)
    raise CheckpointError(checkpoint.where(tensor.name), "dtype F32, BF16 or F16", tensor.dtype)


def _to_bf16(checkpoint: Checkpoint, scale: RawTensor) -> np.ndarray:
    if scale.dtype == "BF16":
        return scale.data
    exact = _to_f32(checkpoint, scale)
    rounded = bf16_from_f32(exact)
    if not np.array_equal(f32_from_bf16(rounded), exact):
        raise _unsupported(checkpoint.where(scale.name), f"int4 scales of dtype {scale.dtype} that bf16 cannot hold")
    return rounded


def _unsupported(where: str, got: str) -> UnsupportedError:
    return UnsupportedError(where, f"one of: {'; '.join(SUPPORTED_QUANTIZATION)}", got)
