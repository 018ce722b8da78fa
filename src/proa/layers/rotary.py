"""Rotary position embedding: the cosine and sine tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from proa.device.backend import Device

__all__ = ["RotaryEmbedding", "RotarySpec", "YarnSpec"]


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN context extension (Peng et al., 2023), with DeepSeek's `mscale` pair; names as in config.json."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def table_factor(self) -> float:
        """What the cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def softmax_factor(self) -> float:
        """What DeepSeek's attention multiplies the softmax scale by: mscale(factor, mscale_all_dim) squared."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation of `dim` dimensions of every head; `interleaved` pairs (2i, 2i+1), otherwise (i, i + dim/2).

    `linear_factor` divides positions (linear context extension); it is 1 where `yarn` is used.
    """

    dim: int
    theta: float
    interleaved: bool = False
    linear_factor: float = 1.0
    yarn: YarnSpec | None = None

    def inverse_frequencies(self) -> torch.Tensor:
        """Float32 `[dim / 2]`, radians per position."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        wavelengths: torch.Tensor = self.theta**exponents
        if self.yarn is None:
            return 1.0 / wavelengths / self.linear_factor
        keep = 1.0 - _yarn_ramp(self.yarn, self.dim, self.theta)
        return 1.0 / (self.yarn.factor * wavelengths) * (1.0 - keep) + 1.0 / wavelengths * keep


class RotaryEmbedding:
    """Tables for positions 0 .. max_positions - 1, and their application in place."""

    __slots__ = ("_cos", "_interleaved", "_rope", "_sin")

    def __init__(self, device: Device, spec: RotarySpec, max_positions: int) -> None:
        self._rope = device.rope
        self._interleaved = spec.interleaved
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * spec.inverse_frequencies()
        factor = 1.0 if spec.yarn is None else spec.yarn.table_factor()
        self._cos = device.place(angles.cos() * factor)
        self._sin = device.place(angles.sin() * factor)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, *, offset: int = 0) -> None:
        """Rotates dims `offset .. offset + dim` of each head of `x` float32 `[T, heads, D]` in place.

        `positions`: int32 `[T]`, each below max_positions.
        """
        self._rope(x, self._cos, self._sin, positions, offset=offset, interleaved=self._interleaved)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_ramp(yarn: YarnSpec, dim: int, theta: float) -> torch.Tensor:
    """0 where a dimension keeps its frequency, 1 where it is slowed by `factor`, linear between; `[dim / 2]`."""

    def dimension_of(rotations: float) -> float:
        return dim * math.log(yarn.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
