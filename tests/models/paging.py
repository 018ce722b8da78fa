"""Drives a model the way the engine does: sequences in scattered KV blocks, mixed batches of chunks and decodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from proa.attention.batch import ForwardBatch, Span
from proa.kvcache.pool import KVPool

BLOCK_SIZE = 16


@dataclass
class Sequence:
    """Tokens seen so far and the blocks they are in."""

    blocks: list[int]
    length: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Pager:
    """Hands out blocks in an order that is never consecutive, and remembers every token's logits."""

    def __init__(self, model, num_blocks: int, dtype: str = "float32", device: str = "cpu") -> None:
        self.model = model
        self.device = torch.device(device)
        self.kv = KVPool(model.layout, num_blocks, BLOCK_SIZE, dtype, self.device)
        self._free = list(range(0, num_blocks, 2)) + list(range(1, num_blocks, 2))

    def sequence(self, max_tokens: int) -> Sequence:
        count = -(-max_tokens // BLOCK_SIZE)
        blocks, self._free = self._free[:count], self._free[count:]
        assert len(blocks) == count
        return Sequence(blocks)

    def forward(
        self, chunks: list[tuple[Sequence, torch.Tensor]], *, last_only: bool = False, still_wanted=None
    ) -> torch.Tensor:
        """Appends each chunk of int32 token ids to its sequence; returns the logits of all (or the last) rows.

        With `still_wanted` the logits that are left; they are not remembered.
        """
        table = torch.zeros(len(chunks), max(len(s.blocks) for s, _ in chunks), dtype=torch.int32)
        positions, ids, slots, logit_rows, spans = [], [], [], [], []
        start = 0
        for index, (sequence, tokens) in enumerate(chunks):
            table[index, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
            place = torch.arange(sequence.length, sequence.length + len(tokens))
            positions.append(place)
            slots.append(table[index].long()[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE)
            ids.append(torch.full((len(tokens),), index))
            rows = torch.arange(start, start + len(tokens))
            logit_rows.append(rows[-1:] if last_only else rows)
            if len(tokens) > 1:
                spans.append(Span(index, start, len(tokens), sequence.length + len(tokens)))
            start += len(tokens)
            sequence.length += len(tokens)
        batch = ForwardBatch(
            token_ids=torch.cat([tokens for _, tokens in chunks]).to(self.device),
            positions=torch.cat(positions).int().to(self.device),
            sequence_ids=torch.cat(ids).int().to(self.device),
            slots=torch.cat(slots).int().to(self.device),
            block_tables=table.to(self.device),
            block_size=BLOCK_SIZE,
            logit_rows=torch.cat(logit_rows).int().to(self.device),
            num_single=next((i for i, (_, tokens) in enumerate(chunks) if len(tokens) > 1), len(chunks)),
            spans=tuple(spans),
        )
        logits = self.model.forward(batch, self.kv, still_wanted).cpu()
        if still_wanted is not None:
            return logits
        parts = logits.split([len(rows) for rows in logit_rows])
        for (sequence, _), part in zip(chunks, parts, strict=True):
            sequence.logits.append(part)
        return logits


def all_logits(sequence: Sequence) -> torch.Tensor:
    return torch.cat(sequence.logits)
