"""Random checkpoint weights with their values decoded independently of the extension, and error bounds of products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from proa.native import _C
from proa.weights.quantize import dequantize, quantize

FORMATS = ("f32", "bf16", "f16", "int4_g32", "fp8_block128", "fp8_channel", "mxfp8")
EPS = 2.0**-24  # largest relative error of one float32 rounding
INPUT_ERROR, PRODUCT_ERROR = 5.6e-3, 8.6e-3  # csrc/gemm/act_budget.h
SPLIT = 2.0**-16  # the same of an activation as the sum of two bf16 terms


@dataclass(frozen=True, slots=True)
class WeightCase:
    """Checkpoint arrays of one linear [out, in] and the exact values they stand for (float64).

    Has the attributes of `RawLinear` that packing reads.
    """

    format: str
    data: np.ndarray
    scales: np.ndarray | None
    values: np.ndarray
    global_scale: float = 1.0
    layout: str = "rows"
    bias: None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    @classmethod
    def make(cls, fmt: str, rows: int, columns: int, rng: np.random.Generator) -> WeightCase:
        """Values of order 1 / sqrt(columns)."""
        std = np.float32(columns**-0.5)
        if fmt == "int4_g32":
            return cls._int4(rows, columns, std, rng)
        if fmt == "fp8_block128":
            return cls._fp8(rows, columns, std, rng)
        values = rng.standard_normal((rows, columns), np.float32) * std
        if fmt == "bf16":
            data = to_bf16(values)
            return cls(fmt, data, None, from_bf16(data))
        if fmt == "f16":
            halves = values.astype(np.float16)
            return cls(fmt, halves.view(np.uint16), None, halves.astype(np.float64))
        if fmt == "f32":
            return cls(fmt, values, None, values.astype(np.float64))
        raw = quantize(values, fmt)
        return cls(fmt, raw.data, raw.scales, dequantize(raw).astype(np.float64))

    @classmethod
    def _int4(cls, rows: int, columns: int, std: np.float32, rng: np.random.Generator) -> WeightCase:
        q = rng.integers(-8, 8, (rows, columns))
        scales = to_bf16(rng.uniform(0.1, 0.4, (rows, columns // 32)).astype(np.float32) * std)
        u = (q + 8).astype(np.uint8)
        values = q * np.repeat(from_bf16(scales), 32, axis=1)
        return cls("int4_g32", u[:, 0::2] | u[:, 1::2] << 4, scales, values)

    @classmethod
    def _fp8(cls, rows: int, columns: int, std: np.float32, rng: np.random.Generator) -> WeightCase:
        codes = torch.from_numpy(rng.standard_normal((rows, columns), np.float32)).to(torch.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128))).astype(np.float32) * std
        grid = np.kron(scales.astype(np.float64), np.ones((128, 128)))[:rows, :columns]
        return cls("fp8_block128", codes.view(torch.uint8).numpy(), scales, codes.double().numpy() * grid)


def column_step(fmt: str) -> int:
    """in_features has to be a multiple of this."""
    return 32 if fmt in ("int4_g32", "mxfp8") else 1


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, as uint16."""
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """The float64 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def fine_groups(groups: np.ndarray, absmax: np.ndarray, budget: float) -> tuple[np.ndarray, np.ndarray]:
    """(which groups have two planes, in which float32 may decide otherwise) by csrc/gemm/act_budget.h.

    The largest have, as few as bring the sum of 32 absmax^2 below what the budget allows. Sums and maxima are within
    1e-4 of float32's.
    """
    rounding = 32 * absmax**2
    order = np.argsort(-absmax, axis=-1)
    largest_first = np.take_along_axis(rounding, order, -1)
    total = largest_first.sum(axis=-1, keepdims=True)
    over = total - np.cumsum(largest_first, -1) + largest_first  # before this one has two planes
    over -= 12 * (127 * budget) ** 2 * (groups**2).sum(axis=(-2, -1))[..., None]
    fine, doubtful = np.zeros(absmax.shape, bool), np.zeros(absmax.shape, bool)
    np.put_along_axis(fine, order, over > 0, -1)
    np.put_along_axis(doubtful, order, np.abs(over) <= 1e-4 * total, -1)
    least = np.where(fine, absmax, np.inf).min(axis=-1, keepdims=True)
    most = np.where(fine, -np.inf, absmax).max(axis=-1, keepdims=True)
    near = (absmax <= least * (1 + 1e-4)) & (absmax >= most * (1 - 1e-4))
    return fine, doubtful | near & (least <= most * (1 + 1e-4))


def quantized(
    x: np.ndarray, x_error: np.ndarray | float = 0.0, budget: float = INPUT_ERROR
) -> tuple[np.ndarray, np.ndarray]:
    """(d * q, bound on its error) of the int8 activations per 32 columns, for x known within x_error.

    d = absmax / 127 or, with two planes, / 1016, and q = round(x / d). Rounding errors move d a little; they change
    q, by one, only where x / d is that close to a half, and the number of planes where that is as close a call.
    """
    groups, errors = (np.broadcast_to(v, x.shape).reshape(*x.shape[:-1], -1, 32) for v in (x, x_error))
    absmax = np.abs(groups).max(axis=-1, keepdims=True)
    fine, doubtful = (flag[..., None] for flag in fine_groups(groups, absmax[..., 0], budget))
    d = absmax / np.where(fine, 1016, 127)
    d_relative = errors.max(axis=-1, keepdims=True) / absmax + 2 * EPS
    ratio = groups / d
    q = np.round(ratio)
    slack = errors / d * (1 + d_relative) + np.abs(ratio) * (d_relative + 2 * EPS)
    flips = np.abs(ratio - q) >= 0.5 - slack
    error = d * (flips + np.abs(q) * d_relative) * (1 + d_relative) + doubtful * absmax / 127
    return (d * q).reshape(x.shape), error.reshape(x.shape)


def bf16_rounded(x: np.ndarray, x_error: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """(x to nearest bf16, bound on how far the kernel's value is from it), x known within x_error.

    A step is 2^-7 of the power of two below; values near a half of one may go either way.
    """
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-120))) - 7)
    q = np.round(x / step)
    return step * q, step * (np.abs(x / step - q) >= 0.5 - x_error / step)


def bf16_terms(fmt: str, activations: Literal["trunk", "int8", "bf16"]) -> int:
    """Of how many bf16 numbers an activation is the sum in the cell in use (docs/decisions/0002); 0: not of such."""
    if fmt not in ("bf16", "fp8_block128", "fp8_channel", "mxfp8"):
        return 0
    chosen = next(row["name"] for row in _C.kernel_report(fmt, 64, 64, activations) if row["chosen"])
    return 2 if chosen.startswith("amx.bf16x2_act.") else int(chosen.startswith("amx."))


def product(
    fmt: str,
    values: np.ndarray,
    x: np.ndarray,
    x_error: np.ndarray | float = 0.0,
    activations: Literal["trunk", "int8", "bf16"] = "trunk",
    budget: float = INPUT_ERROR,
) -> tuple[np.ndarray, np.ndarray]:
    """(x @ values.T with activations as the kernels see them, bound on its error), x [T, in] known within x_error.

    One float32 accumulator: at most `in` roundings, each relative to the sum of magnitudes so far; the scales of fp8
    and int4 add fewer than three per term. AMX cells of bf16 and fp8 round or split the activations first; their
    roundings are at most 17 + in / 16 + in / 128 + 3.
    """
    terms = bf16_terms(fmt, activations)
    if fmt == "int4_g32":
        x, x_error = quantized(x, x_error, budget)
    elif terms == 1:
        x, x_error = bf16_rounded(x, x_error)
    elif terms == 2:
        x_error = x_error + SPLIT * (np.abs(x) + x_error)
    roundings = (values.shape[1] + 3 + 18 * (terms > 0)) * EPS * 1.01
    return x @ values.T, (np.abs(x) * roundings + x_error * (1 + roundings)) @ np.abs(values).T
