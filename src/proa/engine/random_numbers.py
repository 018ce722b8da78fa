"""One uniform number per (seed, position): what a request draws depends on nothing else."""

from __future__ import annotations

__all__ = ["uniform"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A float in [0, 1) with 53 random bits.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) at index `position` of the
    stream that starts at the mixed seed. Seeds count modulo 2**64.
    """
    state = (_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK
    return (_mix(state) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
