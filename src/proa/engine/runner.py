"""Turns scheduled chunks into a ForwardBatch and runs the model on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from proa.attention.batch import ForwardBatch, StillWanted
from proa.engine.scheduler import Chunk
from proa.kvcache.pool import KVPool
from proa.moe.traffic import ExpertTraffic

__all__ = ["ForwardModel", "Runner"]


class ForwardModel(Protocol):
    """What the engine needs of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def expert_traffic(self) -> ExpertTraffic: ...

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        """Logits [L, vocab] float32 of the rows `batch.logit_rows`, without those `still_wanted` left out meanwhile."""
        ...


class Runner:
    """Owns the batch buffers; a batch's tensors are views of them, valid until the next `forward`."""

    def __init__(
        self, model: ForwardModel, pool: KVPool, *, max_tokens: int, max_running: int, max_blocks: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._token_ids = np.zeros(max_tokens, dtype=np.int32)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._sequence_ids = np.zeros(max_tokens, dtype=np.int32)
        self._slots = np.zeros(max_tokens, dtype=np.int32)
        self._block_tables = np.zeros(max_running * max_blocks, dtype=np.int32)
        self._logit_rows = np.zeros(max_running, dtype=np.int32)

    @property
    def expert_traffic(self) -> ExpertTraffic:
        """Of the model, since it was loaded."""
        return self._model.expert_traffic

    def forward(self, chunks: Sequence[Chunk], poll: Callable[[], None] | None = None) -> NDArray[np.float32]:
        """Compute `chunks`; logits [live chunks that draw, vocab] in their order.

        `poll` is called between layers. Chunks of requests it ends are not computed further.
        """
        watch = None if poll is None else _Watch(chunks, poll)
        with torch.inference_mode():
            logits = self._model.forward(self._build(chunks), self._pool, watch)
        expected = (sum(chunk.draws and chunk.live for chunk in chunks), self._model.vocab_size)
        assert tuple(logits.shape) == expected and logits.dtype == torch.float32, (logits.shape, logits.dtype, expected)
        result: NDArray[np.float32] = logits.numpy()
        return result

    def _build(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        block_size = self._pool.block_size
        width = max(len(chunk.table.block_ids) for chunk in chunks)
        tables = self._block_tables[: len(chunks) * width].reshape(len(chunks), width)
        begin = num_logits = 0
        for sequence, chunk in enumerate(chunks):
            end = begin + chunk.count
            block_ids = np.frombuffer(chunk.table.block_ids, dtype=np.int32)
            tables[sequence, : block_ids.size] = block_ids
            tables[sequence, block_ids.size :] = 0
            positions = self._positions[begin:end]
            positions[:] = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32)
            self._token_ids[begin:end] = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
            self._sequence_ids[begin:end] = sequence
            self._slots[begin:end] = block_ids[positions // block_size] * block_size + positions % block_size
            if chunk.draws:
                self._logit_rows[num_logits] = end - 1
                num_logits += 1
            begin = end
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:begin]),
            positions=torch.from_numpy(self._positions[:begin]),
            sequence_ids=torch.from_numpy(self._sequence_ids[:begin]),
            slots=torch.from_numpy(self._slots[:begin]),
            block_tables=torch.from_numpy(tables),
            block_size=block_size,
            logit_rows=torch.from_numpy(self._logit_rows[:num_logits]),
        )


class _Watch:
    """Tells a forward which rows of its batch are still wanted."""

    def __init__(self, chunks: Sequence[Chunk], poll: Callable[[], None]) -> None:
        self._chunks = chunks
        self._poll = poll

    def __call__(self) -> torch.Tensor | None:
        self._poll()
        live = [chunk for chunk in self._chunks if chunk.live]
        if len(live) == len(self._chunks):
            return None
        wanted = np.repeat([chunk.live for chunk in self._chunks], [chunk.count for chunk in self._chunks])
        self._chunks = live
        return torch.from_numpy(np.flatnonzero(wanted))
