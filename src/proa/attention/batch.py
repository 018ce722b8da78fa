"""One forward pass over a mixed batch of prefill chunks and decode tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ForwardBatch"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences; tokens of one sequence are consecutive and in order.

    A token attends to every position <= its own of its sequence, all in the KV cache (its own is written first).
    Slot of position p of sequence s: `block_tables[s, p // block_size] * block_size + p % block_size`.
    """

    token_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    sequence_ids: torch.Tensor  # [T] int32, row in block_tables
    slots: torch.Tensor  # [T] int32, KV slot each token is written to
    block_tables: torch.Tensor  # [S, max_blocks] int32, unused entries 0
    block_size: int
    logit_rows: torch.Tensor  # [L] int32, token rows whose logits are wanted
