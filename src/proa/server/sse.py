"""Server-sent events: one response class for every stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proa.server.errors import describe, error_response

__all__ = ["ClientGoneError", "EventStream", "until_disconnect"]

logger = logging.getLogger("proa.server.sse")

_DONE = b"data: [DONE]\n\n"
_KEEPALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold a stream back.
    (b"x-accel-buffering", b"no"),
]

_Result = TypeVar("_Result")


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is cancelled when the client goes away (ClientGoneError)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """A response that sends `events` as they come, each a JSON object in a `data:` line, then [DONE].

    An error before the first event becomes an ordinary error response, later ones an error event. Silence of
    `keepalive` seconds is broken by a comment. A client that does not read for `write_timeout` seconds is dropped.
    `on_end` is always called, once.
    """

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        *,
        keepalive: float,
        write_timeout: float,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__()
        self._events = events
        self._keepalive = keepalive
        self._write_timeout = write_timeout
        self._on_end = on_end
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(scope, receive, send))
        except ClientGoneError:
            logger.debug("client gone")
        except TimeoutError:
            logger.info("a client that does not read was dropped")
        finally:
            # Also when the stream was never begun.
            self._on_end()
            with contextlib.suppress(RuntimeError):
                await self._events.aclose()  # type: ignore[attr-defined]

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_events(send)
        except TimeoutError:
            raise
        except Exception as error:
            status, body, _ = describe(error)
            if status >= 500:
                logger.error("a stream failed: %s", error, exc_info=error if status == 500 else None)
            if not self._started:
                await error_response(error)(scope, receive, send)
                return
            await self._write(send, _encode(body))
        await self._write(send, _DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        upcoming = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                done, _ = await asyncio.wait([upcoming], timeout=self._keepalive)
                if not done:
                    await self._write(send, _KEEPALIVE)
                    continue
                event = upcoming.result()
                if event is None:
                    return
                await self._write(send, _encode(event))
                upcoming = asyncio.ensure_future(anext(self._events, None))
        finally:
            if not upcoming.done():
                upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)

    async def _write(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._write_timeout):
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": True})


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
