"""Decode steps as CUDA graphs: one replay instead of a thousand launches from Python."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from proa.attention.batch import ForwardBatch
from proa.kvcache.pool import KVPool
from proa.models.loader import Model

__all__ = ["DecodeGraphs"]

_log = logging.getLogger("proa.models")


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """A graph for every number of sequences from 1 to `max_batch`, over one set of index tensors.

    All are captured when it is built, the largest first: the smaller ones reuse its memory. A replay computes what
    `Model.forward` does, bit for bit, with the same kernels.
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
        self._captured: list[_Captured] = []
        pool = None
        for size in range(max_batch, 0, -1):
            self._captured.insert(0, self._capture(model, size, pool))
            pool = self._captured[0].graph.pool()
        _log.info("captured decode steps of 1 to %d sequences in %.1f s", max_batch, time.perf_counter() - started)

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether `batch` is single tokens of which all have logits, and not too many."""
        tokens = batch.token_ids.shape[0]
        return tokens == batch.num_single == batch.logit_rows.shape[0] and tokens <= len(self._captured)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits `[T, vocab]` of a batch that `takes` accepts, valid until the next call."""
        tokens, width = batch.block_tables.shape
        static = self._batch
        static.token_ids[:tokens].copy_(batch.token_ids)
        static.positions[:tokens].copy_(batch.positions)
        static.slots[:tokens].copy_(batch.slots)
        static.block_tables[:tokens, :width].copy_(batch.block_tables)
        captured = self._captured[tokens - 1]
        self._wake()
        captured.graph.replay()
        return captured.logits

    def _capture(self, model: Model, size: int, pool: Any) -> _Captured:
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
            logits = model.forward(batch, self._kv)
        return _Captured(graph, logits)
