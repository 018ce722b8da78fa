"""Keys and values of MLA expanded from the latent cache, for chunks of many tokens.

In its absorbed form attention multiplies 576 + 512 columns per head and pair of tokens, expanded 192 + 128 (with the
dimensions of DeepSeek-V3 and Kimi K2): for a chunk of 100 tokens that saves more than expanding its context costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from proa.attention.batch import ForwardBatch, Span
from proa.device.backend import HeadsWeight
from proa.kvcache.pool import KVPool

__all__ = ["ExpandedChunk", "expanded_bytes"]

# As many heads at a time as keep what is expanded, and their queries in bf16, below this.
_EXPANDED_BYTES = 1 << 30
# Kernels address keys through a table of blocks; expanded ones are one block, of a size that no context reaches.
_ONE_BLOCK = 1 << 30


class ExpandedChunk:
    """One chunk and its context, in all layers of a forward.

    `table`, `block_size`, `sequence_ids` and `positions` address the expanded keys.
    """

    __slots__ = ("_slots", "_span", "block_size", "positions", "sequence_ids", "table")

    def __init__(self, span: Span, batch: ForwardBatch, kv: KVPool) -> None:
        device, size = kv.device, kv.block_size
        blocks = batch.block_tables[span.sequence, : -(-span.context // size)].long()
        self._span = span
        self._slots = (blocks[:, None] * size + torch.arange(size, device=device)).flatten()[: span.context]
        self.block_size = _ONE_BLOCK
        self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.sequence_ids = torch.zeros(span.count, dtype=torch.int32, device=device)
        self.positions = batch.positions[span.first : span.first + span.count]

    def expanded(
        self, cache: torch.Tensor, w_uk: HeadsWeight, w_uv: HeadsWeight, key_dim: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Heads, their keys `[context, heads, key_dim]` and values `[context, heads, value_dim]`, bf16.

        cache: bf16 `[slots, 1, latent_dim]`; w_uk `[heads, rank, nope_dim]`, w_uv `[heads, value_dim, rank]`.
        """
        context = self._span.context
        latents = cache[self._slots, 0]
        to_keys, to_values = w_uk.values(), w_uv.values()
        num_heads, rank, nope_dim = to_keys.shape
        value_dim = to_values.shape[1]
        together = _together(self._span.count, context, num_heads, key_dim, value_dim)
        keys = latents.new_empty(together, context, key_dim)
        values = latents.new_empty(together, context, value_dim)
        for first in range(0, num_heads, together):
            heads = slice(first, min(first + together, num_heads))
            count = heads.stop - first
            low = latents[:, :rank].expand(count, -1, -1)
            # Straight into their place: a product of its own would be as large again.
            torch.bmm(low, to_keys[heads], out=keys[:count, :, :nope_dim])
            keys[:count, :, nope_dim:] = latents[:, rank:]
            torch.bmm(low, to_values[heads].mT, out=values[:count])
            yield heads, keys[:count].transpose(0, 1), values[:count].transpose(0, 1)


def expanded_bytes(tokens: int, context: int, num_heads: int, latent_dim: int, key_dim: int, value_dim: int) -> int:
    """At most what a chunk of `tokens` takes while a layer attends, in a context of up to `context` tokens."""
    head = _head_bytes(tokens, context, key_dim, value_dim)
    # The latents of the context and where they are, keys and values, queries.
    return context * (2 * latent_dim + 8) + min(num_heads * head, max(head, _EXPANDED_BYTES))


def _together(tokens: int, context: int, num_heads: int, key_dim: int, value_dim: int) -> int:
    return max(1, min(num_heads, _EXPANDED_BYTES // _head_bytes(tokens, context, key_dim, value_dim)))


def _head_bytes(tokens: int, context: int, key_dim: int, value_dim: int) -> int:
    return 2 * (context * (key_dim + value_dim) + tokens * key_dim)
