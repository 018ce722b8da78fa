"""Decode steps as CUDA graphs: one replay instead of a thousand launches from Python."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch

from proa.attention.batch import ForwardBatch
from proa.kvcache.pool import KVPool
from proa.models.loader import Model

__all__ = ["DecodeGraphs"]

_log = logging.getLogger("proa.models")


class DecodeGraphs:
    """A graph for every number of sequences from 1 to `max_batch`, over one set of index tensors.

    All are captured when it is built, the largest first: the smaller ones reuse its memory, and all leave their logits
    in one place. A replay computes what `Model.forward` does, bit for bit, with the same kernels.
    """

    def __init__(self, model: Model, kv: KVPool, *, max_batch: int, max_blocks: int) -> None:
        assert model.is_capturable, "an expert strategy that waits for the CPU in Python"
        self._kv = kv
        self._wake = model.wake
        device = kv.device
        rows = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._batch = ForwardBatch(
            token_ids=torch.zeros_like(rows),
            positions=torch.zeros_like(rows),
            sequence_ids=rows,
            slots=torch.full_like(rows, -1),  # nothing is written while capturing
            block_tables=torch.zeros(max_batch, max_blocks, dtype=torch.int32, device=device),
            block_size=kv.block_size,
            logit_rows=rows,
            num_single=max_batch,
        )
        started = time.perf_counter()
        self._logits = torch.empty(max_batch, model.vocab_size, device=device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        pool = None
        for size in range(max_batch, 0, -1):
            self._graphs.insert(0, self._capture(model, size, pool))
            pool = self._graphs[0].pool()
        _log.info("captured decode steps of 1 to %d sequences in %.1f s", max_batch, time.perf_counter() - started)

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether `batch` is single tokens of which all have logits, and not too many."""
        tokens = batch.token_ids.shape[0]
        return tokens == batch.num_single == batch.logit_rows.shape[0] and tokens <= len(self._graphs)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits `[T, vocab]` of a batch that `takes` accepts, valid until the next call."""
        tokens, width = batch.block_tables.shape
        static = self._batch
        static.token_ids[:tokens].copy_(batch.token_ids)
        static.positions[:tokens].copy_(batch.positions)
        static.slots[:tokens].copy_(batch.slots)
        static.block_tables[:tokens, :width].copy_(batch.block_tables)
        self._wake()
        self._graphs[tokens - 1].replay()
        return self._logits[:tokens]

    def _capture(self, model: Model, size: int, pool: Any) -> torch.cuda.CUDAGraph:
        whole = self._batch
        batch = replace(
            whole,
            token_ids=whole.token_ids[:size],
            positions=whole.positions[:size],
            sequence_ids=whole.sequence_ids[:size],
            slots=whole.slots[:size],
            block_tables=whole.block_tables[:size],
            logit_rows=whole.logit_rows[:size],
            num_single=size,
        )
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.forward(batch, self._kv)  # compiles kernels and takes their memory
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            # What a forward returns is the pool's again: the next graph takes the same memory.
            self._logits[:size].copy_(model.forward(batch, self._kv))
        return graph
