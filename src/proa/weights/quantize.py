"""numpy encoders and decoders of the formats of `RawLinear`, for converters and as oracles in tests.

Every quantizer takes the smallest scale at which no element of its group is off by more than half a step of the
element's format, up to the rounding of the scale itself, and rounds elements to nearest even.
"""

from __future__ import annotations

import numpy as np

from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.float_codes import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_from_f32,
    e4m3_from_f32,
    e8m0_from_f32,
    f32_from_e2m1,
    f32_from_e4m3,
    f32_from_e8m0,
)
from proa.weights.formats import ROW_FORMATS, RowFormat
from proa.weights.linear import RawLinear

__all__ = ["dequantize", "pack_nibbles", "quantize", "unpack_nibbles"]

# Largest magnitude an element may have in units of its scale. int4 follows compressed-tensors: -7.5 rounds to -8, and
# 7.5 is clamped to 7. Under e8m0 scales the limit is what still rounds to the largest code, or half of all groups
# would pay for a scale twice as large.
_TOP = {"int4": 7.5, "int8": 127.0, "e4m3": E4M3_MAX, "e2m1": E2M1_MAX}
_TOP_E8M0 = {"e4m3": 464.0, "e2m1": 7.0}
# A scale for groups of zeros, or so small that theirs rounds to zero: bf16's epsilon, as compressed-tensors has it.
_NO_SCALE = np.array([2.0**-7], np.float32)
_CHUNK_ROWS = 4096


def quantize(weight: np.ndarray, to: str) -> RawLinear:
    """float32 `[out, in]` -> the format `to`, layout "rows". `in` has to be a multiple of its group unless ragged."""
    weight = np.ascontiguousarray(weight, np.float32)
    out_features, in_features = weight.shape
    row_format = ROW_FORMATS[to]
    assert row_format.ragged or in_features % max(row_format.group, 1) == 0, f"{to}: {in_features} columns"
    global_scale = 1.0
    if row_format.global_scale:  # the largest group gets the largest e4m3 scale
        absmax = max(-float(weight.min(initial=0.0)), float(weight.max(initial=0.0)))
        global_scale = float(np.float32(absmax / (E4M3_MAX * E2M1_MAX))) or 1.0
    # Parts end where a group of rows ends, so together they are the whole, at a fraction of the memory.
    parts = [
        _quantize_rows(weight[begin : begin + _CHUNK_ROWS], row_format, np.float32(global_scale))
        for begin in range(0, out_features, _CHUNK_ROWS)
    ]
    data = np.concatenate([part[0] for part in parts])
    scales = None if row_format.plain else np.concatenate([part[1] for part in parts if part[1] is not None])
    return RawLinear(to, out_features, in_features, data, scales, global_scale)


def _quantize_rows(
    weight: np.ndarray, row_format: RowFormat, global_scale: np.float32
) -> tuple[np.ndarray, np.ndarray | None]:
    if row_format.plain:
        return _encode_elements(weight, row_format), None
    top = (_TOP_E8M0 if row_format.scale == "e8m0" else _TOP)[row_format.element]
    scales = _encode_scales(_group_absmax(weight, row_format) / np.float32(top) / global_scale, row_format)
    steps = _expand(_decode_scales(scales, row_format), row_format, weight.shape) * global_scale
    elements = np.divide(weight, steps, out=np.zeros_like(weight), where=steps != 0)
    return _encode_elements(elements, row_format), scales


def dequantize(linear: RawLinear) -> np.ndarray:
    """The weight as float32 `[out, in]`, layout "rows": exact for plain formats, else one float32 product.

    nvfp4: two, (element * scale) * global_scale; the first is exact.
    """
    assert linear.layout == "rows", linear.layout
    row_format = ROW_FORMATS[linear.format]
    elements = _decode_elements(linear.data, row_format)
    if linear.scales is None:
        return elements
    shape = (linear.out_features, linear.in_features)
    values = elements * _expand(_decode_scales(linear.scales, row_format), row_format, shape)
    return np.asarray(values * np.float32(linear.global_scale) if row_format.global_scale else values)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 0..15 `[..., n]` -> uint8 `[..., n / 2]`, even columns in the low nibbles."""
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 `[..., n / 2]` -> uint8 0..15 `[..., n]`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _group_absmax(weight: np.ndarray, row_format: RowFormat) -> np.ndarray:
    """float32, one per scale."""
    if row_format.group == 0:
        return np.asarray(np.abs(weight).max(axis=1))
    columns = np.maximum.reduceat(np.abs(weight), np.arange(0, weight.shape[1], row_format.group), axis=1)
    if row_format.rows == 1:
        return np.asarray(columns)
    return np.asarray(np.maximum.reduceat(columns, np.arange(0, weight.shape[0], row_format.rows), axis=0))


def _expand(scales: np.ndarray, row_format: RowFormat, shape: tuple[int, int]) -> np.ndarray:
    """float32 scales -> one per element, or a shape that broadcasts to it."""
    if row_format.group == 0:
        return scales[:, None]
    if row_format.rows > 1:
        scales = np.repeat(scales, row_format.rows, axis=0)[: shape[0]]
    return np.repeat(scales, row_format.group, axis=1)[:, : shape[1]]


def _encode_scales(scales: np.ndarray, row_format: RowFormat) -> np.ndarray:
    if row_format.scale == "f32":
        return np.where(scales > 0, scales, np.float32(1.0)).astype(np.float32)
    if row_format.scale == "bf16":
        encoded = bf16_from_f32(scales)
        encoded[f32_from_bf16(encoded) == 0] = bf16_from_f32(_NO_SCALE)
        return encoded
    if row_format.scale == "f16":
        halves = scales.astype(np.float16)
        halves[halves == 0] = _NO_SCALE
        return halves.view(np.uint16)
    if row_format.scale == "e8m0":
        return e8m0_from_f32(np.where(scales > 0, scales, np.float32(1.0)))
    return e4m3_from_f32(scales)


def _decode_scales(scales: np.ndarray, row_format: RowFormat) -> np.ndarray:
    if row_format.scale == "bf16":
        return f32_from_bf16(scales)
    if row_format.scale == "f16":
        return scales.view(np.float16).astype(np.float32)
    if row_format.scale == "e8m0":
        return f32_from_e8m0(scales)
    return f32_from_e4m3(scales) if row_format.scale == "e4m3" else scales


def _encode_elements(elements: np.ndarray, row_format: RowFormat) -> np.ndarray:
    match row_format.element:
        case "f32":
            return elements
        case "bf16":
            return bf16_from_f32(elements)
        case "f16":
            return elements.astype(np.float16).view(np.uint16)
        case "int4":
            return pack_nibbles((np.clip(np.rint(elements), -8, 7) + 8).astype(np.uint8))
        case "int8":
            return np.asarray(np.clip(np.rint(elements), -127, 127).astype(np.int8))
        case "e2m1":
            return pack_nibbles(e2m1_from_f32(elements))
        case "e4m3":
            return e4m3_from_f32(elements)


def _decode_elements(data: np.ndarray, row_format: RowFormat) -> np.ndarray:
    match row_format.element:
        case "f32":
            return np.array(data)
        case "bf16":
            return f32_from_bf16(data)
        case "f16":
            return np.asarray(data.view(np.float16).astype(np.float32))
        case "int4":
            return unpack_nibbles(data).astype(np.float32) - np.float32(8)
        case "int8":
            return np.asarray(data.astype(np.float32))
        case "e2m1":
            return f32_from_e2m1(unpack_nibbles(data))
        case "e4m3":
            return f32_from_e4m3(data)
