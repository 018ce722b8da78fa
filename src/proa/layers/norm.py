"""RMS normalisation."""

from __future__ import annotations

import torch

from proa.device.backend import Device
from proa.layers.parameters import ParameterReader

__all__ = ["RMSNorm"]


class RMSNorm:
    """`y = x * rsqrt(mean(x^2) + eps) * weight` in float32 (Zhang and Sennrich, 2019), over the last dimension."""

    __slots__ = ("_add_rms_norm", "_rms_norm", "eps", "weight")

    def __init__(self, device: Device, weight: torch.Tensor, eps: float) -> None:
        self._rms_norm = device.rms_norm
        self._add_rms_norm = device.add_rms_norm
        self.weight = weight
        self.eps = eps

    @classmethod
    def load(cls, reader: ParameterReader, name: str, *, size: int, eps: float) -> RMSNorm:
        return cls(reader.device, reader.device.place(reader.vector(f"{name}.weight", size)), eps)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`x`, `out` float32 `[R, D]`, rows may be strided; `out` may be `x` itself."""
        self._rms_norm(x, self.weight, self.eps, out)

    def add_forward(self, residual: torch.Tensor, delta: torch.Tensor, out: torch.Tensor) -> None:
        """`residual += delta`, then `out` = norm of the new residual. All float32 `[T, D]`."""
        self._add_rms_norm(residual, delta, self.weight, self.eps, out)
