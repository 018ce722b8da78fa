"""Server-sent events: one response class for every stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proa.server.errors import describe, error_response

__all__ = ["ClientGoneError", "EventSource", "EventStream", "until_disconnect"]

logger = logging.getLogger("proa.server.sse")

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


class EventSource(Protocol):
    """What a stream sends."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """The events, as they come."""
        ...

    def silence(self) -> bytes:
        """What breaks a silence."""
        ...

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        ...

    def close(self) -> None:
        """Always called in the end, also when nothing was sent."""
        ...


class EventStream(Response):
    """A response that sends the frames of `source` as they come.

    An error before the first frame becomes an ordinary error response, later ones an error event. Silence of
    `keepalive` seconds is broken. A client that does not read for `write_timeout` seconds is dropped.
    """

    def __init__(self, source: EventSource, *, keepalive: float, write_timeout: float) -> None:
        super().__init__()
        self._source = source
        self._keepalive = keepalive
        self._write_timeout = write_timeout
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frames = self._source.frames()
        try:
            await until_disconnect(receive, self._run(frames, scope, receive, send))
        except ClientGoneError:
            logger.debug("client gone")
        except TimeoutError:
            logger.info("a client that does not read was dropped")
        finally:
            self._source.close()
            with contextlib.suppress(RuntimeError):
                await frames.aclose()

    async def _run(self, frames: AsyncGenerator[bytes, None], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_frames(frames, send)
        except TimeoutError:
            raise
        except Exception as error:
            status, *_ = describe(error)
            if status >= 500:
                logger.error("a stream failed: %s", error, exc_info=error if status == 500 else None)
            if not self._started:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            await self._write(send, self._source.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, frames: AsyncGenerator[bytes, None], send: Send) -> None:
        upcoming = asyncio.ensure_future(anext(frames, None))
        try:
            while True:
                done, _ = await asyncio.wait([upcoming], timeout=self._keepalive)
                if not done:
                    await self._write(send, self._source.silence())
                    continue
                frame = upcoming.result()
                if frame is None:
                    return
                await self._write(send, frame)
                upcoming = asyncio.ensure_future(anext(frames, None))
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
