"""One linear from any format to one that `proa convert` writes, and the error that makes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from proa.core.errors import CheckpointError, UnsupportedError
from proa.gguf.types import GGML_TYPES
from proa.native import _C
from proa.weights import gguf_blocks
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.formats import ROW_FORMATS
from proa.weights.gguf_blocks import NATIVE
from proa.weights.quantize import dequantize, pack_nibbles
from proa.weights.raw_linear import RawLinear

__all__ = ["EXACT", "QuantizationError", "check_width", "empty_linear", "requantize"]

# Formats that the native quantizer reads itself; any other is dequantized by numpy.
_NATIVE_SOURCES = ("f32", "bf16", "int4_g32", "fp8_block128")
_DATA_TYPES = {"bf16": np.uint16, "int4": np.uint8, "int8": np.int8, "e4m3": np.uint8}


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Sums over elements, of the source's value against the target's. Linears taken over as they are count nothing."""

    squared_error: float = 0.0
    squared_norm: float = 0.0
    max_abs: float = 0.0

    @staticmethod
    def total(parts: list[QuantizationError]) -> QuantizationError:
        """Of all parts, the same whatever their order."""
        return QuantizationError(
            math.fsum(part.squared_error for part in parts),
            math.fsum(part.squared_norm for part in parts),
            max((part.max_abs for part in parts), default=0.0),
        )

    @property
    def relative(self) -> float:
        """L2 norm of the difference over that of the source."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm > 0 else 0.0


EXACT = QuantizationError()


def requantize(linear: RawLinear, to: str, where: str) -> tuple[RawLinear, QuantizationError]:
    """`linear` in the format `to`: bf16, int4_g32, int8_g128 or fp8_block128. Its bias goes with it.

    A linear that is in that format already is returned as it is; int4 in larger groups keeps its integers. Everything
    else is quantized by the rules of `proa.weights.quantize`, bit for bit. `where` names the linear in errors.

    CheckpointError for weights that are not finite, UnsupportedError for a width the format does not take.
    """
    check_width(linear.in_features, to, where)
    if linear.layout == "ggml":
        linear = _rows_of_blocks(linear, where)
    if linear.format == to:
        return linear, EXACT
    if ROW_FORMATS[linear.format].element == "int4":
        regrouped, error = _regroup(linear)
        if to == "int4_g32":
            return regrouped, error
        if error == EXACT:
            linear = regrouped
    if linear.format not in _NATIVE_SOURCES:
        values = np.ascontiguousarray(dequantize(linear), np.float32)
        linear = RawLinear("f32", linear.out_features, linear.in_features, values, None, bias=linear.bias)
    return _quantize(linear, to, where)


def check_width(in_features: int, to: str, where: str) -> None:
    """UnsupportedError unless a linear with so many inputs can be stored in the format `to`."""
    multiple = 32 if to in ("int4_g32", "int8_g128") else 1
    if in_features % multiple:
        raise UnsupportedError(where, f"a multiple of {multiple} inputs for {to}", in_features, "use BF16 or FP8")


def empty_linear(to: str, shape: tuple[int, int], *, bias: bool) -> RawLinear:
    """A linear `[out, in]` of the format `to` whose values are not set."""
    out_features, in_features = shape
    row_format = ROW_FORMATS[to]
    columns = in_features // 2 if row_format.nibbles else in_features
    scales = None
    if not row_format.plain:
        scale_type = np.float32 if row_format.scale == "f32" else np.uint16
        scales = np.empty(row_format.scale_shape(*shape), scale_type)
    data = np.empty((out_features, columns), _DATA_TYPES[row_format.element])
    return RawLinear(to, *shape, data, scales, bias=np.empty(out_features, np.float32) if bias else None)


def _rows_of_blocks(linear: RawLinear, where: str) -> RawLinear:
    """GGUF blocks as rows: Q4_0 keeps its integers, other types become their values. UnsupportedError without gguf."""
    if linear.format == "int4_g32_f16":
        return _rows_of_q4_0(linear)
    types = {GGML_TYPES[number].name: GGML_TYPES[number] for number in GGML_TYPES}
    name = next(name for name, native in NATIVE.items() if native.format == linear.format)
    try:
        values = gguf_blocks.dequantize(types[name], linear.data)
    except ImportError:
        fix = "pip install gguf"
        raise UnsupportedError(where, f"the gguf package, to convert {name}", "none installed", fix) from None
    return RawLinear("f32", linear.out_features, linear.in_features, values, None, bias=linear.bias)


def _rows_of_q4_0(linear: RawLinear) -> RawLinear:
    """Blocks of an fp16 scale and 16 bytes, with elements 0..15 in their low nibbles and 16..31 in the high ones."""
    blocks = linear.data.reshape(linear.out_features, -1, 18)
    codes = np.concatenate([blocks[:, :, 2:] & 15, blocks[:, :, 2:] >> 4], axis=2).reshape(linear.out_features, -1)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<u2")[:, :, 0]
    return replace(linear, data=pack_nibbles(codes), scales=scales, layout="rows")


def _quantize(linear: RawLinear, to: str, where: str) -> tuple[RawLinear, QuantizationError]:
    result = replace(empty_linear(to, (linear.out_features, linear.in_features), bias=False), bias=linear.bias)
    data = result.data.view(np.uint8) if result.data.dtype == np.int8 else result.data
    source = np.ascontiguousarray(linear.data)
    *sums, finite = _C.quantize(linear.format, source, linear.scales, to, data, result.scales)
    error = QuantizationError(*sums)
    if not finite or not math.isfinite(error.squared_error):
        got = "inf or NaN" if not finite else f"values beyond the range of {to}"
        raise CheckpointError(where, "finite weights", got, "these weights cannot be converted; download them again")
    return result, error


def _regroup(linear: RawLinear) -> tuple[RawLinear, QuantizationError]:
    """int4 of any group as int4_g32: the same integers, each scale repeated and, if it is fp16, rounded to bf16."""
    row_format = ROW_FORMATS[linear.format]
    assert linear.scales is not None
    repeats = row_format.group // 32
    if row_format.scale == "bf16":
        exact, bits = True, linear.scales
    else:
        scales = linear.scales.view(np.float16).astype(np.float32)
        bits = bf16_from_f32(scales)
        exact = np.array_equal(f32_from_bf16(bits), scales)
    result = replace(linear, format="int4_g32", scales=np.repeat(bits, repeats, axis=1))
    if exact:
        return result, EXACT
    values = dequantize(linear)
    difference = dequantize(result) - values
    squared_error, squared_norm = (float(np.square(part, dtype=np.float64).sum()) for part in (difference, values))
    return result, QuantizationError(squared_error, squared_norm, float(np.abs(difference).max()))
