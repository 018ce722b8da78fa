"""A batch from which sequences leave."""

from __future__ import annotations

import torch

from proa.attention.batch import ForwardBatch, Span


def test_select_keeps_whole_sequences_and_what_is_known_of_them():
    counts = [1, 1, 3, 4, 2]
    rows = torch.arange(sum(counts), dtype=torch.int32)
    firsts = [0, 1, 2, 5, 9]
    batch = ForwardBatch(
        token_ids=rows + 100,
        positions=rows + 200,
        sequence_ids=torch.repeat_interleave(torch.arange(5), torch.tensor(counts)).int(),
        slots=rows + 300,
        block_tables=torch.zeros(5, 1, dtype=torch.int32),
        block_size=16,
        logit_rows=torch.tensor([0, 1, 4, 10], dtype=torch.int32),  # the fourth is a part of a prompt
        num_single=2,
        spans=tuple(Span(s, firsts[s], counts[s], 50 + s) for s in (2, 3, 4)),
    )
    kept = torch.tensor([1, 5, 6, 7, 8, 9, 10])  # the second, fourth and fifth sequence
    left = batch.select(kept)
    assert left.token_ids.tolist() == [101, 105, 106, 107, 108, 109, 110]
    assert left.sequence_ids.tolist() == [1, 3, 3, 3, 3, 4, 4]
    assert left.logit_rows.tolist() == [0, 6]
    assert left.num_single == 1
    assert left.spans == (Span(3, 1, 4, 53), Span(4, 5, 2, 54))
