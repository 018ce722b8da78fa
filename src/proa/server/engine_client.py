"""What the routes know of the engine: submit sequences, get their tokens, be told when it is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Literal

from proa.core.errors import QueueFullError, UnavailableError, UserError
from proa.ipc.messages import (
    Abort,
    EngineStats,
    ExpertsRecorded,
    FlushCache,
    Flushed,
    FromEngine,
    Generate,
    Ready,
    RecordExperts,
    StepOutput,
    ToEngine,
    TokenOutput,
)
from proa.server.progress import PromptProgress

__all__ = ["EngineClient", "GenerationStream"]

logger = logging.getLogger("proa.server.client")

_ANSWER_SECONDS = 10.0


class GenerationStream:
    """The outputs of the sequences of one request. To be closed in the end."""

    def __init__(self, client: EngineClient, requests: list[Generate], names: frozenset[str]) -> None:
        self._client = client
        self.names = names
        self._outputs: deque[TokenOutput] = deque()
        self.progress = PromptProgress({request.rid: len(request.token_ids) for request in requests})
        self._arrived = asyncio.Event()
        self.running = {request.rid for request in requests}

    def put(self, output: TokenOutput) -> None:
        """Called by the client for each output of a sequence of this stream."""
        self.progress.finish(output.rid)
        self._outputs.append(output)
        self._arrived.set()

    async def next(self) -> list[TokenOutput]:
        """All outputs that arrived since the last call, at least one. Cancellation loses none."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def abort(self, rid: str) -> None:
        """Stop one sequence, for instance at a stop string. Its further outputs are dropped."""
        self._client.abort(rid)

    def close(self) -> None:
        """Abort what still runs."""
        for rid in list(self.running):
            self._client.abort(rid)


class EngineClient:
    """Routes outputs to the streams that wait for them. Lives on one event loop.

    Args:
        send: hands a message to the engine process.
        max_queued: sequences in flight beyond those the engine runs at once.
    """

    def __init__(self, send: Callable[[ToEngine], None], *, max_queued: int) -> None:
        self._send = send
        self._max_queued = max_queued
        self._streams: dict[str, GenerationStream] = {}
        self._answers: dict[str, asyncio.Future[Flushed | ExpertsRecorded]] = {}
        self._finished = asyncio.Event()
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] = lambda _: None

    @property
    def num_in_flight(self) -> int:
        """Sequences submitted and not finished."""
        return len(self._streams)

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        while self._streams:
            self._finished.clear()
            await self._finished.wait()

    def require_ready(self) -> Ready:
        """What the engine said at its start.

        Raises:
            UnavailableError: no engine takes requests now.
        """
        if self.ready is None:
            raise UnavailableError("engine", "a loaded engine", "one that is starting", "watch /readyz and retry")
        return self.ready

    def submit(self, requests: list[Generate], *, names: frozenset[str] = frozenset()) -> GenerationStream:
        """Start generating. `names` are what `abort_named` finds the stream by.

        Raises:
            QueueFullError: no room now.      UserError: more sequences than there will ever be room for.
            UnavailableError: no engine.
        """
        ready = self.require_ready()
        limit = ready.max_running_requests + self._max_queued
        if len(requests) > limit:
            raise UserError("n", f"at most {limit} sequences in a request", len(requests))
        if len(self._streams) + len(requests) > limit:
            raise QueueFullError(limit)
        stream = GenerationStream(self, requests, names)
        for request in requests:
            self._streams[request.rid] = stream
            self._send(request)
        return stream

    def abort(self, rid: str) -> None:
        """Stop `rid` and forget it; nothing happens when it has finished."""
        stream = self._streams.pop(rid, None)
        if stream is not None:
            stream.running.discard(rid)
            self._finished.set()
            self._send(Abort(rid))

    def abort_named(self, name: str | None) -> int:
        """End the sequences of streams called `name` (None: of all) with finish_reason "abort". Returns how many."""
        rids = [rid for rid, stream in self._streams.items() if name is None or name in stream.names]
        for rid in rids:
            self._send(Abort(rid))
            self._dispatch(TokenOutput(rid=rid, token_ids=[], finish_reason="abort"))
        return len(rids)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run or without an answer."""
        answer = await self._ask(FlushCache(secrets.token_hex(8)))
        return isinstance(answer, Flushed) and answer.ok

    async def record_experts(self, action: Literal["start", "stop", "dump"]) -> list[list[int]] | None:
        """Begin or end to record routing, or get the tokens by MoE layer and expert; None: nothing was recorded.

        Raises:
            UnavailableError: no engine, or none that answers.
        """
        answer = await self._ask(RecordExperts(secrets.token_hex(8), action))
        if not isinstance(answer, ExpertsRecorded):
            raise UnavailableError("engine", "an answer", "none", "retry when it is ready")
        return answer.counts

    async def _ask(self, question: FlushCache | RecordExperts) -> Flushed | ExpertsRecorded | None:
        """The engine's answer; None without one in time.

        Raises:
            UnavailableError: no engine takes requests now.
        """
        self.require_ready()
        future: asyncio.Future[Flushed | ExpertsRecorded] = asyncio.get_running_loop().create_future()
        self._answers[question.id] = future
        self._send(question)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await future
        except TimeoutError:
            return None
        finally:
            self._answers.pop(question.id, None)

    def handle(self, message: FromEngine) -> None:
        """Take a message of the engine."""
        match message:
            case StepOutput():
                self.stats = message.stats
                self.on_stats(message.stats)
                for output in message.outputs:
                    self._dispatch(output)
                for progress in message.progress:
                    if (stream := self._streams.get(progress.rid)) is not None:
                        stream.progress.advance(progress.rid, progress.tokens_done)
            case Ready():
                self.ready = message
            case Flushed() | ExpertsRecorded():
                future = self._answers.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)

    def fail_all(self, reason: str) -> None:
        """End every running sequence with an error."""
        for rid in list(self._streams):
            self._dispatch(TokenOutput(rid=rid, token_ids=[], finish_reason="error", error=reason))

    def engine_down(self, reason: str) -> None:
        """The engine process is gone."""
        self.ready = None
        self.fail_all(reason)
        for question, future in self._answers.items():
            if not future.done():
                future.set_result(Flushed(question, ok=False))

    def _dispatch(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.rid)
        if stream is None:
            return  # aborted: the engine had not heard of it yet
        if output.finish_reason is not None:
            del self._streams[output.rid]
            stream.running.discard(output.rid)
            self._finished.set()
        stream.put(output)
