"""Random blocks of the GGML types that have kernels, with the values the `gguf` package gives them."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

from proa.gguf.types import GGML_TYPES, GgmlType
from proa.weights.gguf_blocks import NATIVE, common_format, to_linear
from proa.weights.linear import RawLinear

TYPES: dict[str, GgmlType] = {item.name: item for item in GGML_TYPES.values()}
BLOCK_TYPES = [name for name, native in NATIVE.items() if native.dtype is None]
# Where the fp16 numbers of a block stand, and the first byte of the codes where zero codes leave the minimum alone.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
HALVES |= {"Q4_1": (0, 2), "Q5_1": (0, 2)}
CODES = {"Q4_1": slice(4, 20), "Q5_1": slice(4, 24), "Q2_K": slice(16, 80), "Q4_K": slice(16, 144)}
CODES |= {"Q5_K": slice(16, 176)}
# The minimum in the middle of the codes; of K-quants it is subtracted.
MIDDLE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# Standard deviation of random codes times random sub-scales, to be divided out.
SPREAD = {"Q4_0": 5, "Q4_1": 5, "Q5_0": 10, "Q5_1": 10, "Q8_0": 77, "IQ4_NL": 70, "MXFP4": 3}
SPREAD |= {"Q2_K": 10, "Q3_K": 45, "Q4_K": 170, "Q5_K": 340, "Q6_K": 1400}


def any_blocks(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 `[rows, row bytes]`: any bytes are blocks; inf and NaN are among their scales."""
    return rng.integers(0, 256, (rows, columns // TYPES[name].block_elements * TYPES[name].block_bytes), np.uint8)


def plain_blocks(name: str, rows: int, columns: int, rng: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """The same with scales such that the values' standard deviation is about size / sqrt(columns)."""
    kind = TYPES[name]
    blocks = any_blocks(name, rows, columns, rng).reshape(-1, kind.block_bytes)
    if name == "MXFP4":
        exponent = 127 + round(np.log2(size * columns**-0.5 / SPREAD[name]))
        blocks[:, 0] = rng.integers(exponent - 1, exponent + 2, len(blocks))
    if name in ("Q4_K", "Q5_K"):  # sub-scales that are the sub-minimums too
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    if name == "Q2_K":
        blocks[:, :16] = (blocks[:, :16] & 15) * 17
    scales = rng.uniform(0.5, 1.5, len(blocks)) * size * columns**-0.5 / SPREAD[name]
    # Codes have a mean, which minimums take away as they do in real weights.
    factors = (1.0, MIDDLE.get(name, 1.0))
    for offset, factor in zip(HALVES.get(name, (0,)), factors, strict=False):
        blocks[:, offset : offset + 2] = (factor * scales).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(name: str, blocks: np.ndarray) -> np.ndarray:
    """float32 `[rows, columns]`."""
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return np.asarray(values, np.float32)


@dataclass(frozen=True, slots=True)
class BlockCase:
    """A linear in blocks with its exact values (float64) and the magnitude of the two terms each is the sum of."""

    name: str
    linear: RawLinear
    values: np.ndarray
    magnitude: np.ndarray

    @classmethod
    def make(cls, name: str, rows: int, columns: int, rng: np.random.Generator) -> BlockCase:
        blocks = plain_blocks(name, rows, columns, rng)
        values = values_of(name, blocks).astype(np.float64)
        minimum = np.zeros_like(values)
        if name in CODES:
            without = blocks.reshape(rows, -1, TYPES[name].block_bytes).copy()
            without[:, :, CODES[name]] = 0
            minimum = values_of(name, without.reshape(rows, -1)).astype(np.float64)
        linear = to_linear(TYPES[name], blocks, common_format([TYPES[name]]))
        return cls(name, linear, values, np.abs(values - minimum) + np.abs(minimum))
