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

__all__ = ["EXPANDED_BYTES", "ExpandedChunk"]

# As many heads at a time as keep what is expanded below this.
EXPANDED_BYTES = 1 << 30
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
        rope = latents[:, rank:]
        head_bytes = 2 * context * (key_dim + nope_dim + to_values.shape[1])
        together = max(1, min(num_heads, EXPANDED_BYTES // head_bytes))
        for first in range(0, num_heads, together):
            heads = slice(first, min(first + together, num_heads))
            keys = latents.new_empty(heads.stop - first, context, key_dim)
            keys[:, :, :nope_dim] = torch.matmul(latents[:, :rank], to_keys[heads])
            keys[:, :, nope_dim:] = rope
            values = torch.matmul(latents[:, :rank], to_values[heads].mT)
            yield heads, keys.transpose(0, 1), values.transpose(0, 1)
