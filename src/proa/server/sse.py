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
        # Whether something is being written, and when that began or ended.
        self._is_writing = False
        self._since = 0.0

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
            await self._watched(self._send_frames(frames, send), send)
        except TimeoutError:
            raise
        except Exception as error:
            status, *_ = describe(error)
            if status >= 500:
                logger.error("a stream failed: %s", error, exc_info=error if status == 500 else None)
            if not self._started:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            async with asyncio.timeout(self._write_timeout):
                await self._write(send, self._source.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, frames: AsyncGenerator[bytes, None], send: Send) -> None:
        """A stream is thousands of frames: neither a task nor a timer for each."""
        async for frame in frames:
            await self._write(send, frame)

    async def _watched(self, sending: Coroutine[Any, Any, None], send: Send) -> None:
        """Breaks silences of `sending`, and ends it with TimeoutError when a write takes too long."""
        clock = asyncio.get_running_loop().time
        self._since = clock()
        task = asyncio.ensure_future(sending)
        try:
            while not task.done():
                # A write that begins meanwhile has its own limit: nobody sleeps longer than that.
                left = self._since + self._limit - clock()
                await asyncio.wait([task], timeout=max(min(left, self._write_timeout), 0))
                if task.done() or clock() - self._since < self._limit:
                    continue
                if self._is_writing:
                    raise TimeoutError
                async with asyncio.timeout(self._write_timeout):
                    await self._write(send, self._source.silence())
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _limit(self) -> float:
        return self._write_timeout if self._is_writing else self._keepalive

    async def _write(self, send: Send, data: bytes) -> None:
        clock = asyncio.get_running_loop().time
        self._is_writing, self._since = True, clock()
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing, self._since = False, clock()
