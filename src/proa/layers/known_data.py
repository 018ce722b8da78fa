"""Weights and activations of the self-tests, made by integer arithmetic alone: the same on every machine."""

from __future__ import annotations

import numpy as np

from proa.native._C import PackedWeight
from proa.weights.quantize import dequantize, quantize
from proa.weights.raw_linear import RawLinear

__all__ = ["block_weight", "known_activations", "known_product", "known_values", "known_weight"]

# GGUF blocks: type in file -> elements, bytes, offsets of its fp16 fields (gguf's constants.py and quants.py).
_BLOCKS = {
    "q4_1": (32, 20, (0, 2)),
    "iq4_nl": (32, 18, (0,)),
    "q5_0": (32, 22, (0,)),
    "q5_1": (32, 24, (0, 2)),
    "q2_k": (256, 84, (80, 82)),
    "q3_k": (256, 110, (108,)),
    "q4_k": (256, 144, (0, 2)),
    "q5_k": (256, 176, (0, 2)),
    "q6_k": (256, 210, (208,)),
}


def known_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x @ weight.T` without the threads of a BLAS."""
    return np.asarray(np.einsum("ti,oi->to", x, weight))


def known_values(raw: RawLinear, packed: PackedWeight) -> np.ndarray:
    """float64 `[out, in]`, not from the packed bytes where numpy can read the raw ones."""
    return (dequantize(raw) if raw.layout == "rows" else packed.dequantize()).astype(np.float64)


def known_weight(weight_format: str, out_features: int, in_features: int, seed: int) -> RawLinear:
    """A weight of magnitudes around 1 / sqrt(in)."""
    if weight_format in _BLOCKS:
        return block_weight(weight_format, out_features, in_features, seed)
    rows, columns = np.ogrid[:out_features, :in_features]
    integers = _mixed(rows * np.uint32(in_features) + columns + seed * 1_000_003) % 255
    return quantize((integers.astype(np.float32) - 127) / np.float32(64 * in_features**0.5), weight_format)


def block_weight(weight_format: str, out_features: int, in_features: int, seed: int) -> RawLinear:
    """A weight in the blocks of a GGUF type, of random codes and equal fp16 scales; values up to about 1/4."""
    elements, nbytes, halves = _BLOCKS[weight_format]
    count = in_features // elements
    data = (_mixed(np.arange(out_features * count * nbytes, dtype=np.uint32) + seed * 1_000_003) & 255).astype(np.uint8)
    blocks = data.reshape(out_features, count, nbytes)
    scale = np.array([2.0**-12 if elements == 256 else 2.0**-8], np.float16).view(np.uint8)
    for offset in halves:
        blocks[..., offset : offset + 2] = scale
    return RawLinear(weight_format, out_features, in_features, data.reshape(out_features, -1), None, layout="ggml")


def _mixed(index: np.ndarray) -> np.ndarray:
    """A hash of uint32 (Wang, 2007)."""
    mixed = index.astype(np.uint32)
    mixed = (mixed ^ np.uint32(61)) ^ (mixed >> np.uint32(16))
    mixed = mixed * np.uint32(9)
    mixed = mixed ^ (mixed >> np.uint32(4))
    mixed = mixed * np.uint32(0x27D4EB2D)
    return mixed ^ (mixed >> np.uint32(15))


def known_activations(tokens: int, columns: int) -> np.ndarray:
    """Integers -7 .. 7, and one of 127 or -127 in every 32 columns, float32 `[tokens, columns]`."""
    token, column = np.ogrid[:tokens, :columns]
    x = (_mixed(token * np.uint32(7919) + column) % 15).astype(np.float32) - 7
    peaks = column % 32 == (token + column // 32) % 32
    return np.where(peaks, np.where((token + column) % 3 == 0, np.float32(-127), np.float32(127)), x)
