"""Turns scheduled chunks into a ForwardBatch and runs the model on it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from proa.attention.batch import ForwardBatch, Span, StillWanted
from proa.engine.device_sampler import Drawable, draw_on_device
from proa.engine.scheduler import Chunk
from proa.kvcache.pool import KVPool
from proa.moe.traffic import ExpertTraffic, HybridTraffic

__all__ = ["MAX_SHORT_TOKENS", "ForwardModel", "PrefillPass", "Runner", "StepGraphs"]

# Of a pass between two layers of another: with more of them experts take as long as in the largest pass.
MAX_SHORT_TOKENS = 2048


class ForwardModel(Protocol):
    """What the engine needs of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def expert_traffic(self) -> ExpertTraffic: ...

    @property
    def hybrid_traffic(self) -> HybridTraffic | None: ...

    @property
    def expert_faults(self) -> int:
        """How often an expert was looked for where it is not, since loading: each is a wrong result."""
        ...

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        """Logits [L, vocab] float32 of the rows `batch.logit_rows`, without those `still_wanted` left out meanwhile."""
        ...

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        """The same, stopping between layers with the share of them that is done.

        Decode steps may run there, and one whole pass of up to MAX_SHORT_TOKENS tokens, begun as this one was.
        """
        ...

    def recover(self) -> None:
        """After a forward that raised, once the device has nothing to do: the next one begins from a clean state."""
        ...


class StepGraphs(Protocol):
    """Recorded forwards of some kinds of batches."""

    def takes(self, batch: ForwardBatch) -> bool: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """What the model's forward returns, valid until the next call."""
        ...


class Runner:
    """Owns the batch buffers; a batch's tensors are views of them, valid until the next forward or pass."""

    def __init__(
        self,
        model: ForwardModel,
        pool: KVPool,
        *,
        max_tokens: int,
        max_running: int,
        max_blocks: int,
        graphs: StepGraphs | None = None,
        running_bytes: int = 0,
    ) -> None:
        """`running_bytes`: that torch takes of a GPU while a step runs."""
        self._model = model
        self._graphs = graphs
        self._pool = pool
        size = 4 * max_tokens + max_running + max_running * max_blocks
        self._indices, self._pass_indices = (_IndexBuffer(size, pool.device) for _ in range(2))
        short = 4 * min(MAX_SHORT_TOKENS, max_tokens) + max_running + max_running * max_blocks
        self._short_indices = _IndexBuffer(short, pool.device)
        self._running_bytes = running_bytes
        self._take_memory()

    @property
    def expert_traffic(self) -> ExpertTraffic:
        """Of the model, since it was loaded."""
        return self._model.expert_traffic

    @property
    def hybrid_traffic(self) -> HybridTraffic | None:
        """The same of experts that CPU and GPU share."""
        return self._model.hybrid_traffic

    def forward(self, chunks: Sequence[Chunk], poll: Callable[[], None] | None = None) -> Sequence[Drawable]:
        """Compute `chunks`; what the live chunks that draw are drawn from, in their order.

        Logits [vocab] in CPU memory, or on a GPU the token itself where nothing but a draw was asked for.
        `poll` is called between layers. Chunks of requests it ends are not computed further.
        """
        faults = self._model.expert_faults
        with torch.inference_mode():
            logits = self._logits(self._build(chunks, self._indices), _watch(chunks, poll))
            return self._drawables(chunks, logits, faults)

    def begin(
        self, chunks: Sequence[Chunk], poll: Callable[[], None] | None = None, *, between: bool = False
    ) -> PrefillPass:
        """The same layer by layer: `forward` of decoding sequences may be called in between.

        One at a time, and `between` two of its layers one of MAX_SHORT_TOKENS tokens at most, which ends first.
        """
        faults = self._model.expert_faults
        with torch.inference_mode():
            batch = self._build(chunks, self._short_indices if between else self._pass_indices)
            layers = self._model.layers(batch, self._pool, _Watch(chunks, poll))
        return PrefillPass(chunks, layers, lambda logits: self._drawables(chunks, logits, faults))

    def recover(self) -> None:
        """After a forward or pass that raised: ends what it left on the device, and gives back memory nobody uses.

        Raises what a device that is lost raises; then the engine has to start again.
        """
        device = self._pool.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._model.recover()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            with suppress(torch.OutOfMemoryError):  # somebody else has it; steps take what they find
                self._take_memory()

    def _take_memory(self) -> None:
        """Has torch's allocator hold what a step takes, in one piece, before a prompt needs it."""
        device = self._pool.device
        if device.type == "cuda":
            some = torch.ones(32, 32, dtype=torch.bfloat16, device=device)
            torch.mm(some, some)  # cuBLAS takes its workspace, which stays
            torch.empty(self._running_bytes, dtype=torch.uint8, device=device)

    def _drawables(self, chunks: Sequence[Chunk], logits: torch.Tensor, faults: int) -> Sequence[Drawable]:
        """`faults`: of the experts before these chunks."""
        drawing = [chunk for chunk in chunks if chunk.draws and chunk.live]
        expected = (len(drawing), self._model.vocab_size)
        assert tuple(logits.shape) == expected and logits.dtype == torch.float32, (logits.shape, expected)
        if logits.device.type == "cpu":
            rows: NDArray[np.float32] = logits.numpy()
            drawables: Sequence[Drawable] = list(rows)
        else:
            drawables = draw_on_device(logits, [chunk.request for chunk in drawing])
        # Drawing has waited for the device. Without a draw the last layer's experts are not asked.
        if (found := self._model.expert_faults - faults) != 0:
            raise RuntimeError(f"[experts] expected ids of experts that are in RAM, got {found} others")
        return drawables

    def _logits(self, batch: ForwardBatch, watch: StillWanted | None) -> torch.Tensor:
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.forward(batch)  # a step of few tokens: nobody waits long for its end
        return self._model.forward(batch, self._pool, watch)

    def _build(self, chunks: Sequence[Chunk], indices: _IndexBuffer) -> ForwardBatch:
        block_size = self._pool.block_size
        tokens = sum(chunk.count for chunk in chunks)
        width = max(len(chunk.table.block_ids) for chunk in chunks)
        num_logits = sum(chunk.draws for chunk in chunks)
        views = indices.take([tokens, tokens, tokens, tokens, num_logits, len(chunks) * width])
        token_ids, positions, sequence_ids, slots, logit_rows, tables = views
        tables = tables.reshape(len(chunks), width)
        num_single = next((i for i, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))
        spans = []
        begin = logit = 0
        for sequence, chunk in enumerate(chunks):
            end = begin + chunk.count
            block_ids = np.frombuffer(chunk.table.block_ids, dtype=np.int32)
            tables[sequence, : block_ids.size] = block_ids
            tables[sequence, block_ids.size :] = 0
            place = positions[begin:end]
            place[:] = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32)
            token_ids[begin:end] = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
            sequence_ids[begin:end] = sequence
            slots[begin:end] = block_ids[place // block_size] * block_size + place % block_size
            if chunk.count > 1:
                spans.append(Span(sequence, begin, chunk.count, chunk.start + chunk.count))
            if chunk.draws:
                logit_rows[logit] = end - 1
                logit += 1
            begin = end
        sent = indices.send()
        return ForwardBatch(
            token_ids=sent[0],
            positions=sent[1],
            sequence_ids=sent[2],
            slots=sent[3],
            block_tables=sent[5].view(len(chunks), width),
            block_size=block_size,
            logit_rows=sent[4],
            num_single=num_single,
            spans=tuple(spans),
        )


class PrefillPass:
    """Prompt tokens on their way through the layers of the model."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        layers: Generator[float, None, torch.Tensor],
        finish: Callable[[torch.Tensor], Sequence[Drawable]],
    ) -> None:
        self.chunks = chunks
        self.share_done = 0.0  # of the layers
        # Kept by who calls `advance`: seconds in these layers, and in passes between them; whether it is a second try.
        self.seconds = self.others_seconds = 0.0
        self.is_retry = False
        self._layers = layers
        self._finish = finish

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    def advance(self) -> Sequence[Drawable] | None:
        """Computes the next layer; after the last one what `Runner.forward` returns."""
        with torch.inference_mode():
            try:
                self.share_done = next(self._layers)
            except StopIteration as end:
                return self._finish(end.value)
            return None


class _IndexBuffer:
    """The index arrays of a batch, one behind the other, so that they go to a GPU in one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._array: NDArray[np.int32] = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if device.type != "cpu" else self._host
        self._sizes: list[int] = []
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def take(self, sizes: list[int]) -> list[NDArray[np.int32]]:
        """Arrays of `sizes` to fill."""
        if self._copied is not None:
            self._copied.synchronize()  # a prefill step may end before its copy was made
        self._sizes = sizes
        return np.split(self._array[: sum(sizes)], np.cumsum(sizes)[:-1])

    def send(self) -> Sequence[torch.Tensor]:
        """What was filled, on the device."""
        total = sum(self._sizes)
        if self._device is not self._host:
            self._device[:total].copy_(self._host[:total], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return torch.split(self._device[:total], self._sizes)


def _watch(chunks: Sequence[Chunk], poll: Callable[[], None] | None) -> _Watch | None:
    return None if poll is None else _Watch(chunks, poll)


class _Watch:
    """Tells a forward which rows of its batch are still wanted."""

    def __init__(self, chunks: Sequence[Chunk], poll: Callable[[], None] | None) -> None:
        self._chunks = chunks
        self._poll = poll

    def __call__(self) -> torch.Tensor | None:
        if self._poll is not None:
            self._poll()
        live = [chunk for chunk in self._chunks if chunk.live]
        if len(live) == len(self._chunks):
            return None
        wanted = np.repeat([chunk.live for chunk in self._chunks], [chunk.count for chunk in self._chunks])
        self._chunks = live
        return torch.from_numpy(np.flatnonzero(wanted))
