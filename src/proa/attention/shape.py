"""What an attention backend is told of a model when it is created."""

from __future__ import annotations

from dataclasses import dataclass

from proa.kvcache.layout import KVLayout

__all__ = ["MAX_SINGLE", "HeadShape", "gpu_block_tokens", "single_token_bytes"]

# Sequences of one token beyond these are taken for chunks on a GPU: with so many, one program a sequence fills it.
MAX_SINGLE = 256
_MAX_KEY_DIM = 1024  # of `kernels/decode_attention.py`
# Programs of one launch that fill any GPU, where several fit a multiprocessor.
_MAX_PROGRAMS = 768


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`value_dim`: of one head's output."""

    num_heads: int
    value_dim: int


def gpu_block_tokens(layout: KVLayout) -> int:
    """Tokens of a KV block that hold whole tiles of the kernels on a GPU."""
    return 64 if layout.latent else 128


def single_token_bytes(shape: HeadShape) -> int:
    """At most what kernels for single tokens keep: queries in bf16, and what the splits of a context hand over."""
    slots = MAX_SINGLE if shape.value_dim > 256 else max(MAX_SINGLE, _MAX_PROGRAMS)
    return shape.num_heads * (2 * MAX_SINGLE * _MAX_KEY_DIM + 4 * slots * (shape.value_dim + 1))
