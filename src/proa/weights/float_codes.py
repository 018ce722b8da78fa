"""Floating-point codes numpy lacks, as unsigned bytes: e4m3 (fp8), e2m1 (fp4), e8m0 (a power of two).

From the OCP 8-bit floating point (2023) and microscaling formats (2023) specifications. All decoders are exact.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "E8M0_NAN",
    "e2m1_from_f32",
    "e4m3_from_f32",
    "e8m0_from_f32",
    "f32_from_e2m1",
    "f32_from_e4m3",
    "f32_from_e8m0",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_NAN = 0xFF
_E4M3_NAN = 0x7F
_E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3_from_f32(values: np.ndarray) -> np.ndarray:
    """float32 -> uint8 e4m3fn, rounded to nearest even and saturated at 448; NaN -> NaN."""
    magnitude = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    # frexp: magnitude = m * 2^e with m in [0.5, 1); below 2^-6 the format is subnormal with the step of 2^-6.
    exponent = np.frexp(np.maximum(magnitude, np.float32(2.0**-6)))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - exponent))
    # Normal numbers have steps 8..16 (16 carries into the exponent), subnormal ones 0..8: the same sum for both.
    codes = (exponent + 7) * 8 + np.nan_to_num(steps).astype(np.int32) - 8
    codes = np.where(np.isnan(values), _E4M3_NAN, codes) | np.where(np.signbit(values), 0x80, 0)
    return codes.astype(np.uint8)


def f32_from_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 e4m3fn of any shape -> float32."""
    return np.take(_E4M3_VALUES, codes)


def e2m1_from_f32(values: np.ndarray) -> np.ndarray:
    """float32 -> uint8 code 0..15 (bit 3 is the sign), rounded to nearest even and saturated at 6. No NaN."""
    magnitude = np.abs(values)
    codes = np.where(np.signbit(values), np.uint8(8), np.uint8(0))
    # Midpoints of neighbours; in the middle the even code wins: upwards from an odd one, downwards from an even one.
    for code, middle in enumerate((_E2M1_MAGNITUDES[1:] + _E2M1_MAGNITUDES[:-1]) / 2):
        codes = codes + (magnitude >= middle if code % 2 else magnitude > middle)
    return np.asarray(codes, np.uint8)


def f32_from_e2m1(codes: np.ndarray) -> np.ndarray:
    """uint8 codes 0..15 of any shape -> float32."""
    return np.take(_E2M1_VALUES, codes)


def e8m0_from_f32(values: np.ndarray) -> np.ndarray:
    """float32 above zero -> uint8, the smallest power of two that is not below the value, of 2^-127 .. 2^127."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.clip(exponent - (mantissa == 0.5) + 127, 0, 254), np.uint8)


def f32_from_e8m0(codes: np.ndarray) -> np.ndarray:
    """uint8 b of any shape -> float32 2^(b - 127); 255 -> NaN. 2^-127 is subnormal."""
    return np.take(_E8M0_VALUES, codes)


def _e4m3_table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa.astype(np.float32), -9), np.ldexp((8.0 + mantissa), exponent - 10)
    )
    magnitude = np.where(codes & 0x7F == _E4M3_NAN, np.nan, magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3_VALUES = _e4m3_table()
_E2M1_VALUES = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
_E8M0_VALUES = np.where(np.arange(256) == E8M0_NAN, np.nan, np.ldexp(1.0, np.arange(256) - 127)).astype(np.float32)
