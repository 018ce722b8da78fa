"""From blocks of a GGML type to a format that `proa.native` packs.

`NATIVE` has the types that `proa.native` packs as they are, number for number; every other type is dequantized by the
`gguf` package to the nearest of ours, bf16. A type that gets a kernel of its own gets an entry here and nothing else
changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from proa.core.errors import UnsupportedError
from proa.gguf.types import GgmlType
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.linear import RawLinear

__all__ = [
    "NATIVE",
    "NativeFormat",
    "check_readable",
    "common_format",
    "dequantize",
    "first_bad_scale",
    "is_finite",
    "to_linear",
]

_E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class NativeFormat:
    """`format` holds all numbers of a GGML type: as rows of `dtype`, or as its blocks (None).

    `halves`: where the fp16 numbers of a block stand, in bytes.
    """

    format: str
    dtype: str | None = None
    halves: tuple[int, ...] = ()


NATIVE: dict[str, NativeFormat] = {
    "F32": NativeFormat("f32", "<f4"),
    "F16": NativeFormat("f16", "<u2"),
    "BF16": NativeFormat("bf16", "<u2"),
    "Q4_0": NativeFormat("int4_g32_f16", halves=(0,)),
    "Q4_1": NativeFormat("q4_1", halves=(0, 2)),
    "Q5_0": NativeFormat("q5_0", halves=(0,)),
    "Q5_1": NativeFormat("q5_1", halves=(0, 2)),
    "Q8_0": NativeFormat("int8_g32_f16", halves=(0,)),
    "Q2_K": NativeFormat("q2_k", halves=(80, 82)),
    "Q3_K": NativeFormat("q3_k", halves=(108,)),
    "Q4_K": NativeFormat("q4_k", halves=(0, 2)),
    "Q5_K": NativeFormat("q5_k", halves=(0, 2)),
    "Q6_K": NativeFormat("q6_k", halves=(208,)),
    "MXFP4": NativeFormat("mxfp4"),
    "IQ4_NL": NativeFormat("iq4_nl", halves=(0,)),
}


def common_format(types: Iterable[GgmlType]) -> str:
    """The format for tensors that have to share one: their own where it is the same, else a float format.

    Where one is stored as float32 or float16 that is f32, which holds every type; else bf16.
    """
    names = {ggml_type.name for ggml_type in types}
    formats = {NATIVE[name].format if name in NATIVE else "bf16" for name in names}
    if len(formats) == 1:
        return formats.pop()
    return "f32" if names & {"F32", "F16"} else "bf16"


def to_linear(ggml_type: GgmlType, blocks: np.ndarray, weight_format: str) -> RawLinear:
    """Blocks uint8 `[out, row bytes]` in `weight_format`, the type's own or the one of `common_format`.

    In its own format the arrays are views of `blocks`, those of misaligned floats aside.
    """
    out_features = blocks.shape[0]
    in_features = blocks.shape[1] // ggml_type.block_bytes * ggml_type.block_elements
    native = NATIVE.get(ggml_type.name)
    if native is not None and native.format == weight_format:
        if native.dtype is None:
            return RawLinear(weight_format, out_features, in_features, blocks, None, layout="ggml")
        data = _aligned(blocks, np.dtype(native.dtype))
    else:
        assert weight_format in ("f32", "bf16"), "other formats are chosen for exact types only"
        values = dequantize(ggml_type, blocks)
        data = values if weight_format == "f32" else bf16_from_f32(values)
    return RawLinear(weight_format, out_features, in_features, data, None)


def first_bad_scale(ggml_type: GgmlType, blocks: np.ndarray) -> tuple[int, int] | None:
    """Row and block of the first scale that is inf or NaN in blocks uint8 `[out, row bytes]`; None: there is none.

    Only for types with kernels of their own: floats are not looked through, what is dequantized `is_finite` tells.
    """
    native = NATIVE.get(ggml_type.name)
    if native is None or native.dtype is not None:
        return None
    each = blocks.reshape(-1, ggml_type.block_bytes)
    if ggml_type.name == "MXFP4":
        bad = each[:, 0] == _E8M0_NAN
    else:
        numbers = [each[:, at : at + 2].view("<u2")[:, 0] for at in native.halves]
        bad = np.logical_or.reduce([(bits & 0x7C00) == 0x7C00 for bits in numbers])
    if not bad.any():
        return None
    row, block = divmod(int(np.argmax(bad)), blocks.shape[1] // ggml_type.block_bytes)
    return row, block


def is_finite(linear: RawLinear) -> bool:
    """Whether all elements of a linear in f32 or bf16 are finite."""
    bits = linear.data.view(f"u{linear.data.itemsize}")
    exponent = bits.dtype.type(0x7F80 << 8 * (bits.itemsize - 2))
    return not bool(((bits & exponent) == exponent).any())


def dequantize(ggml_type: GgmlType, blocks: np.ndarray) -> np.ndarray:
    """Blocks uint8 `[out, row bytes]` as float32 `[out, in]`. Inf and NaN scales give inf and NaN."""
    if ggml_type.name == "F32":
        return _aligned(blocks, np.dtype("<f4"))
    if ggml_type.name == "F16":
        with np.errstate(invalid="ignore"):  # signalling NaN
            return _aligned(blocks, np.dtype("<f2")).astype(np.float32)
    if ggml_type.name == "BF16":
        return f32_from_bf16(_aligned(blocks, np.dtype("<u2")))
    import gguf  # here: an optional package, which the types above do without

    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[ggml_type.name])
    return np.ascontiguousarray(values, np.float32)


def check_readable(ggml_type: GgmlType, where: str) -> None:
    """UnsupportedError unless blocks of this type can be read here: natively or, all that is left, by `dequantize`."""
    if ggml_type.name in NATIVE:
        return
    if ggml_type.block_elements == 1:
        raise UnsupportedError(where, "weights of a float or quantized type", ggml_type.name)
    try:
        dequantize(ggml_type, np.zeros((1, ggml_type.block_bytes), np.uint8))
    except ImportError:
        fix = "pip install gguf"
        raise UnsupportedError(where, f"the gguf package, to read {ggml_type.name}", "none installed", fix) from None
    except (NotImplementedError, KeyError):
        raise UnsupportedError(where, "a type the gguf package can dequantize", ggml_type.name) from None


def _aligned(blocks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A view where the file leaves it aligned, as all do but those of a strange `general.alignment`."""
    values = blocks.view(dtype)
    return values if values.flags.aligned else values.copy()
