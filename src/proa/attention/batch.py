"""One forward pass over a mixed batch of prefill chunks and decode tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

__all__ = ["ForwardBatch", "Span", "StillWanted"]

# Asked between layers: the token rows [K] int64 that are still wanted, ascending and counted in the batch as it is by
# then; whole sequences. None: all of them.
StillWanted = Callable[[], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `first .. first + count` are one sequence's, the last `count` of the `context` tokens it then has."""

    sequence: int  # row in block_tables
    first: int
    count: int
    context: int


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
    logit_rows: torch.Tensor  # [L] int32, token rows whose logits are wanted, ascending
    num_single: int = 0  # the first rows, each the only token of its sequence; there may be others
    spans: tuple[Span, ...] = ()  # chunks of several tokens, as far as they are known; first row ascending

    def select(self, rows: torch.Tensor) -> ForwardBatch:
        """The batch of the token rows `rows` [K] int64, ascending, alone."""
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            sequence_ids=self.sequence_ids[rows],
            slots=self.slots[rows],
            logit_rows=torch.isin(rows, self.logit_rows).nonzero()[:, 0].int(),
            num_single=int((rows < self.num_single).sum()),
            spans=tuple(
                replace(span, first=int((rows < span.first).sum()))
                for span in self.spans
                if bool((rows == span.first).any())
            ),
        )
