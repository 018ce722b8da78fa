"""What the routes know of the engine: submit sequences, get their tokens, be told when it is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable

from proa.core.errors import QueueFullError, UnavailableError, UserError
from proa.ipc.messages import (
    Abort,
    EngineStats,
    FlushCache,
    Flushed,
    FromEngine,
    Generate,
    Ready,
    StepOutput,
    ToEngine,
    TokenOutput,
)
from proa.server.progress import PromptProgress

__all__ = ["EngineClient", "GenerationStream"]

logger = logging.getLogger("proa.server.client")

_FLUSH_SECONDS = 10.0


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
        self._flushes: dict[str, asyncio.Future[bool]] = {}
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
        self.require_ready()
        flush = FlushCache(secrets.token_hex(8))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes[flush.id] = future
        self._send(flush)
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                return await future
        except TimeoutError:
            return False
        finally:
            self._flushes.pop(flush.id, None)

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
            case Flushed():
                future = self._flushes.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message.ok)

    def fail_all(self, reason: str) -> None:
        """End every running sequence with an error."""
        for rid in list(self._streams):
            self._dispatch(TokenOutput(rid=rid, token_ids=[], finish_reason="error", error=reason))

    def engine_down(self, reason: str) -> None:
        """The engine process is gone."""
        self.ready = None
        self.fail_all(reason)
        for future in self._flushes.values():
            if not future.done():
                future.set_result(False)

    def _dispatch(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.rid)
        if stream is None:
            return  # aborted: the engine had not heard of it yet
        if output.finish_reason is not None:
            del self._streams[output.rid]
            stream.running.discard(output.rid)
            self._finished.set()
        stream.put(output)
