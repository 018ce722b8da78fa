"""bfloat16 as uint16 arrays: numpy has no such type."""

from __future__ import annotations

import numpy as np

__all__ = ["bf16_from_f32", "f32_from_bf16"]


def f32_from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 of any shape -> float32 copy, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_from_f32(values: np.ndarray) -> np.ndarray:
    """float32 of any shape -> uint16 bf16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding could carry a NaN into the sign bit; keep its sign and make it quiet.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
