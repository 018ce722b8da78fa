"""What an attention backend is told of a model when it is created."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HeadShape"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`value_dim`: of one head's output."""

    num_heads: int
    value_dim: int
