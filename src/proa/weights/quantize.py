"""numpy encoders and decoders of the quantized formats of `RawLinear`, for converters and as oracles in tests."""

from __future__ import annotations

import numpy as np

from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.linear import RawLinear
from proa.weights.quantization import FP8_BLOCK, INT4_GROUP

__all__ = ["dequantize", "e4m3_from_f32", "f32_from_e4m3", "quantize_fp8_block128", "quantize_int4_g32"]

E4M3_MAX = 448.0
_E4M3_NAN = 0x7F


def quantize_int4_g32(weight: np.ndarray) -> RawLinear:
    """float32 `[out, in]`, in a multiple of 32 -> int4_g32.

    The rule of compressed-tensors' symmetric int4: scale = absmax / 7.5 per group of 32, rounded to bf16; then
    q = clamp(round-half-even(w / scale), -8, 7), stored as q + 8.
    """
    out_features, in_features = weight.shape
    groups = weight.astype(np.float32, copy=False).reshape(out_features, in_features // INT4_GROUP, INT4_GROUP)
    absmax = np.abs(groups).max(axis=2)
    scales = bf16_from_f32(absmax / np.float32(7.5))
    # A group of zeros, or one so small that its scale rounds to zero: the library takes bf16's epsilon.
    scales[f32_from_bf16(scales) == 0] = bf16_from_f32(np.array(2.0**-7))
    quants = np.clip(np.rint(groups / f32_from_bf16(scales)[:, :, None]), -8, 7)
    nibbles = (quants + 8).astype(np.uint8).reshape(out_features, in_features)
    return RawLinear("int4_g32", out_features, in_features, nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales)


def quantize_fp8_block128(weight: np.ndarray) -> RawLinear:
    """float32 `[out, in]` -> fp8_block128: scale = absmax / 448 per block of a ceil grid, e4m3 = round(w / scale)."""
    out_features, in_features = weight.shape
    rows, columns = -(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK)
    row_absmax = np.maximum.reduceat(np.abs(weight), np.arange(0, in_features, FP8_BLOCK), axis=1)
    absmax = np.maximum.reduceat(row_absmax, np.arange(0, out_features, FP8_BLOCK), axis=0)
    scales = np.where(absmax > 0, absmax / np.float32(E4M3_MAX), np.float32(1.0)).astype(np.float32)
    assert scales.shape == (rows, columns)
    codes = e4m3_from_f32(weight / _expand_blocks(scales, weight.shape))
    return RawLinear("fp8_block128", out_features, in_features, codes, scales)


def dequantize(linear: RawLinear) -> np.ndarray:
    """The weight as float32 `[out, in]`: the value of every format, exactly (int4 and fp8: one f32 multiply)."""
    if linear.format == "f32":
        return np.array(linear.data)
    if linear.format == "bf16":
        return f32_from_bf16(linear.data)
    assert linear.scales is not None
    if linear.format == "fp8_block128":
        shape = (linear.out_features, linear.in_features)
        return np.asarray(f32_from_e4m3(linear.data) * _expand_blocks(linear.scales, shape))
    assert linear.format == "int4_g32", linear.format
    nibbles = np.empty((linear.out_features, linear.in_features), np.float32)
    nibbles[:, 0::2] = linear.data & 15
    nibbles[:, 1::2] = linear.data >> 4
    return np.asarray((nibbles - 8) * np.repeat(f32_from_bf16(linear.scales), INT4_GROUP, axis=1))


def e4m3_from_f32(values: np.ndarray) -> np.ndarray:
    """float32 -> uint8 e4m3fn, rounded to nearest even and saturated at 448; NaN -> NaN."""
    magnitude = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    # frexp: magnitude = m * 2^e with m in [0.5, 1); below 2^-6 the format is subnormal with the step of 2^-6.
    exponent = np.frexp(np.maximum(magnitude, np.float32(2.0**-6)))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - exponent))
    # Normal numbers have steps 8..16 (16 carries into the exponent), subnormal ones 0..8: the same sum for both.
    codes = (exponent + 7) * 8 + np.nan_to_num(steps).astype(np.int32) - 8
    codes = np.where(np.isnan(values), _E4M3_NAN, codes) | np.where(np.signbit(values), 0x80, 0)
    return codes.astype(np.uint8)


def f32_from_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 e4m3fn of any shape -> float32, exact."""
    return np.take(_E4M3_VALUES, codes)


def _expand_blocks(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """`[ceil(out / 128), ceil(in / 128)]` -> `[out, in]`."""
    rows = np.repeat(scales, FP8_BLOCK, axis=0)[: shape[0]]
    return np.repeat(rows, FP8_BLOCK, axis=1)[:, : shape[1]]


def _e4m3_table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa.astype(np.float32), -9), np.ldexp((8.0 + mantissa), exponent - 10)
    )
    magnitude = np.where(codes & 0x7F == _E4M3_NAN, np.nan, magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3_VALUES = _e4m3_table()
