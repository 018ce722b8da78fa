"""Durations and sizes as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_duration", "parse_size"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B")
_FACTORS = {"": 1, **{f"{p}i": 1024 ** (i + 1) for i, p in enumerate("KMGT")}}
_FACTORS |= {p: 1000 ** (i + 1) for i, p in enumerate("KMGT")}


def parse_duration(value: float | str) -> float:
    """Seconds from a number of them or a text such as `90s`, `5m`, `1.5h`. Raises ValueError."""
    if not isinstance(value, str):
        return float(value)
    if (match := _DURATION.fullmatch(value.strip())) is None:
        raise ValueError(value)
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(value: int | str) -> int:
    """Bytes from a number of them or a text such as `640GiB`, `20 GB`. Raises ValueError."""
    if not isinstance(value, str):
        return int(value)
    if (match := _SIZE.fullmatch(value.strip())) is None:
        raise ValueError(value)
    return int(float(match[1]) * _FACTORS[match[2] or ""])
