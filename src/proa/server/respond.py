"""Runs a planned request and answers, streaming or not, through one code path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from proa.server.assembler import Delta
from proa.server.frontend import Frontend
from proa.server.generation import Generation, GenerationPlan, Usage
from proa.server.protocol import StreamOptions
from proa.server.request_body import services_of
from proa.server.sse import EventStream, until_disconnect

__all__ = ["AnswerFormat", "respond"]


# Above this, building a response with log-probabilities takes longer than a stream should wait.
_INLINE_DELTAS = 1000


class AnswerFormat(Protocol):
    """How deltas become the bodies of one API."""

    def first_chunks(self) -> Iterator[dict[str, Any]]: ...
    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]: ...
    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...
    def response(self, deltas: list[Delta], usage: Usage) -> dict[str, Any]: ...


async def respond(
    request: Request, plan: GenerationPlan, answer: AnswerFormat, *, stream: bool, options: StreamOptions | None
) -> Response:
    """The response to `request`. The sequences are aborted as soon as the client is gone."""
    services = services_of(request)
    generation = services.start(plan)
    if stream:
        return EventStream(
            _chunks(generation, answer, options or StreamOptions()),
            keepalive=services.config.keepalive_interval,
            write_timeout=services.config.write_timeout,
            on_end=generation.close,
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


async def _chunks(
    generation: Generation, answer: AnswerFormat, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    opened = False
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            # Not before the first token: clients take the first chunk's time as the time to first token.
            if not opened:
                opened = True
                for chunk in answer.first_chunks():
                    yield chunk
            for chunk in answer.chunks(delta):
                if options.include_usage:
                    chunk["usage"] = None
                if options.continuous_usage_stats:
                    chunk["usage"] = generation.usage.as_dict()
                yield chunk
    if options.include_usage:
        yield answer.usage_chunk(generation.usage)
