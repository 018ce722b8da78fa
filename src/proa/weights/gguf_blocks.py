"""From blocks of a GGML type to a format that `proa.native` packs.

`NATIVE` says which formats hold a type's numbers exactly; every other type is dequantized by the `gguf` package to
the nearest of ours, bf16. A type that gets a kernel of its own gets an entry here and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from proa.core.errors import UnsupportedError
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.gguf_types import GgmlType
from proa.weights.linear import RawLinear

__all__ = ["NATIVE", "Repack", "check_readable", "common_format", "dequantize", "to_linear"]

# Blocks looked at in one step of an exactness check: bounds its memory, and ends it early for most files.
_CHECK_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Repack:
    """A lossless way from a GGML type to `format`.

    convert: blocks uint8 `[out, row bytes]` -> data and scales of a RawLinear.
    fits: whether `format` holds all of these blocks `[n, block bytes]` exactly; None: it always does.
    """

    format: str
    convert: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
    fits: Callable[[np.ndarray], bool] | None = None


def common_format(tensors: Iterable[tuple[GgmlType, np.ndarray]]) -> str:
    """The format for tensors that have to share one: their own where it is the same and exact, else a float format.

    Each tensor is its type and its blocks uint8 `[..., row bytes]`. Where one is stored as float32 or float16 that is
    f32, which holds every type; else bf16.
    """
    formats = {_exact_format(ggml_type, blocks) for ggml_type, blocks in tensors}
    if len(formats) == 1:
        return formats.pop()
    return "f32" if "f32" in formats else "bf16"


def to_linear(ggml_type: GgmlType, blocks: np.ndarray, weight_format: str) -> RawLinear:
    """Blocks uint8 `[out, row bytes]` in `weight_format`: exactly where `common_format` chose it as exact for them."""
    out_features = blocks.shape[0]
    in_features = blocks.shape[1] // ggml_type.block_bytes * ggml_type.block_elements
    native = NATIVE.get(ggml_type.name)
    if native is not None and native.format == weight_format:
        data, scales = native.convert(blocks)
    else:
        assert weight_format in ("f32", "bf16"), "other formats are chosen for exact repacks only"
        values = dequantize(ggml_type, blocks)
        data, scales = values if weight_format == "f32" else bf16_from_f32(values), None
    return RawLinear(weight_format, out_features, in_features, data, scales)


def dequantize(ggml_type: GgmlType, blocks: np.ndarray) -> np.ndarray:
    """Blocks uint8 `[out, row bytes]` as float32 `[out, in]`. Inf and NaN scales give inf and NaN."""
    if ggml_type.name == "F32":
        return _f32(blocks)[0]
    if ggml_type.name == "F16":
        return _f32_from_f16(blocks)[0]
    if ggml_type.name == "BF16":
        return f32_from_bf16(_bf16(blocks)[0])
    import gguf  # here: an optional package, which the types above do without

    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[ggml_type.name])
    return np.ascontiguousarray(values, np.float32)


def check_readable(ggml_type: GgmlType, where: str) -> None:
    """UnsupportedError unless `dequantize` can read blocks of this type here."""
    if ggml_type.block_elements == 1:
        if ggml_type.name not in NATIVE:
            raise UnsupportedError(where, "weights of a float or quantized type", ggml_type.name)
        return
    try:
        dequantize(ggml_type, np.zeros((1, ggml_type.block_bytes), np.uint8))
    except ImportError:
        fix = "pip install gguf"
        raise UnsupportedError(where, f"the gguf package, to read {ggml_type.name}", "none installed", fix) from None
    except (NotImplementedError, KeyError):
        raise UnsupportedError(where, "a type the gguf package can dequantize", ggml_type.name) from None


def _exact_format(ggml_type: GgmlType, blocks: np.ndarray) -> str:
    native = NATIVE.get(ggml_type.name)
    if native is None:
        return "bf16"
    if native.fits is None:
        return native.format
    # A reshape of a view of the file: no copy, as tensors lie there in whole blocks without gaps.
    flat = blocks.reshape(-1, ggml_type.block_bytes)
    steps = range(0, flat.shape[0], _CHECK_BLOCKS)
    return native.format if all(native.fits(flat[i : i + _CHECK_BLOCKS]) for i in steps) else "bf16"


def _f32(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    return _aligned(blocks, np.dtype("<f4")), None


def _bf16(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    return _aligned(blocks, np.dtype("<u2")), None


def _f32_from_f16(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return _aligned(blocks, np.dtype("<f2")).astype(np.float32), None


def _aligned(blocks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A view where the file leaves it aligned, as all do but those of a strange `general.alignment`."""
    values = blocks.view(dtype)
    return values if values.flags.aligned else values.copy()


def _int4_from_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q4_0: fp16 d, then 16 bytes with elements 0..15 in their low nibbles, 16..31 in the high ones; (u - 8) * d.

    int4_g32 has the same values, neighbours in one byte, and bf16 scales.
    """
    parts = blocks.reshape(blocks.shape[0], -1, 18)
    low, high = parts[:, :, 2:] & 15, parts[:, :, 2:] >> 4
    data = np.empty((*parts.shape[:2], 16), np.uint8)
    data[:, :, :8] = low[:, :, 0::2] | low[:, :, 1::2] << 4
    data[:, :, 8:] = high[:, :, 0::2] | high[:, :, 1::2] << 4
    scales = bf16_from_f32(_fp16_scales(parts))
    return data.reshape(blocks.shape[0], -1), scales


def _q4_0_fits(blocks: np.ndarray) -> bool:
    """bf16 has fp16's range and 3 fraction bits less. Scales that are not finite are not called exact."""
    scales = _fp16_scales(blocks)
    return bool(np.isfinite(scales).all()) and np.array_equal(f32_from_bf16(bf16_from_f32(scales)), scales)


def _fp16_scales(blocks: np.ndarray) -> np.ndarray:
    """The fp16 number that every block `[..., block bytes]` begins with, as float32."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)


NATIVE: dict[str, Repack] = {
    "F32": Repack("f32", _f32),
    "F16": Repack("f32", _f32_from_f16),
    "BF16": Repack("bf16", _bf16),
    "Q4_0": Repack("int4_g32", _int4_from_q4_0, _q4_0_fits),
}
