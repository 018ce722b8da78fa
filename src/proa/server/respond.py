"""Runs a planned request and answers, streaming or not, through one code path."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec
from fastapi import Request
from starlette.responses import Response

from proa.server.framing import AnswerFormat
from proa.server.frontend import Frontend
from proa.server.generation import Generation, GenerationPlan
from proa.server.request_body import services_of
from proa.server.sse import EventStream, until_disconnect

__all__ = ["respond"]


# Above this, building a response with log-probabilities takes longer than a stream should wait.
_INLINE_DELTAS = 1000


async def respond(request: Request, plan: GenerationPlan, answer: AnswerFormat, *, stream: bool) -> Response:
    """The response to `request`. The sequences are aborted as soon as the client is gone."""
    services = services_of(request)
    generation = services.start(plan)
    if stream:
        return EventStream(
            _Stream(generation, answer),
            keepalive=services.config.keepalive_interval,
            write_timeout=services.config.write_timeout,
        )
    try:
        body = await until_disconnect(request.receive, _collect(generation, answer, services.frontend))
    finally:
        generation.close()
    return Response(body, media_type="application/json")


async def _collect(generation: Generation, answer: AnswerFormat, frontend: Frontend) -> bytes:
    deltas = [delta async for delta in generation.deltas()]
    if len(deltas) <= _INLINE_DELTAS:
        return msgspec.json.encode(answer.response(deltas, generation.usage))
    return await frontend.in_worker(lambda: msgspec.json.encode(answer.response(deltas, generation.usage)))


class _Stream:
    """The events of one answer. It opens with the first token: clients take that time as the time to first token."""

    def __init__(self, generation: Generation, answer: AnswerFormat) -> None:
        self._generation = generation
        self._answer = answer
        self._frame = answer.framing.frame
        self._is_open = False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What a delta brings is one frame, however many events it is."""
        generation, answer = self._generation, self._answer
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                opening = b"".join(self._open())
                yield opening + b"".join(map(self._frame, answer.events(delta, lambda: generation.usage)))
        yield b"".join(map(self._frame, answer.closing(generation.usage))) + answer.framing.end

    def silence(self) -> bytes:
        """A comment with the progress of the prompt, and events for clients that wait for some."""
        comment = f": {self._generation.progress}\n\n".encode()
        # The opening first: events are numbered in the order they are asked for.
        return self._named_opening() + comment + b"".join(map(self._frame, self._answer.silence()))

    def failure(self, error: Exception) -> bytes:
        """The error as this API has it."""
        framing = self._answer.framing
        return self._named_opening() + self._frame(self._answer.failure(framing.error_shape(error))) + framing.end

    def close(self) -> None:
        """Abort what still runs."""
        self._generation.close()

    def _named_opening(self) -> bytes:
        """What has to stand before events that have names, if it was not sent yet."""
        return b"".join(self._open()) if self._answer.framing.is_named else b""

    def _open(self) -> Iterator[bytes]:
        if not self._is_open:
            self._is_open = True
            yield from map(self._frame, self._answer.opening(self._generation.usage))
