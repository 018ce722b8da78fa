"""What an attention backend is told of a model when it is created."""

from __future__ import annotations

from dataclasses import dataclass

from proa.kvcache.layout import KVLayout

__all__ = ["HeadShape", "gpu_block_tokens"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`value_dim`: of one head's output."""

    num_heads: int
    value_dim: int


def gpu_block_tokens(layout: KVLayout) -> int:
    """Tokens of a KV block that hold whole tiles of the kernels on a GPU."""
    return 64 if layout.latent else 128
