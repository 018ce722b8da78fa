"""One HTTP/1.1 exchange with an engine, on a connection of its own.

A connection per request costs a tenth of a millisecond on loopback. In return aborting is closing it, none goes stale,
and none is left over. Bytes of the body come out as they came in; chunked framing is taken off.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import httptools

from proa.core.errors import UnavailableError

__all__ = ["Exchange", "Header", "UpstreamError", "UpstreamRequest", "open_exchange"]

Header = tuple[bytes, bytes]

_CONNECT_SECONDS = 10.0
_MAX_HEAD_BYTES = 256 * 1024
# Reading stops above this, until the client has taken what there is.
_MAX_BUFFERED_BYTES = 256 * 1024
# For the engine to close first: one that watches for clients that leave may take a prompt close for an abort.
_LINGER_SECONDS = 1.0


class UpstreamError(UnavailableError):
    """The engine could not be reached, or broke off before its response was complete."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What is sent. `target`: path and query; `headers`: without the body's length."""

    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes

    def encode(self) -> bytes:
        """The bytes on the wire."""
        head = [b"%b %b HTTP/1.1\r\n" % (self.method, self.target)]
        head += [b"%b: %b\r\n" % header for header in self.headers]
        if self.body or self.method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            head.append(b"content-length: %d\r\n" % len(self.body))
        return b"".join([*head, b"connection: close\r\n\r\n", self.body])


async def open_exchange(host: str, port: int, request: UpstreamRequest, *, where: str) -> Exchange:
    """Connect and send `request`. `where` names the engine in errors. The caller has to `abort` it in the end.

    Raises:
        UpstreamError: nobody listens there.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, exchange = await loop.create_connection(lambda: Exchange(request, where), host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer"
        raise UpstreamError(where, "an engine that takes connections", reason, "retry; see its log") from error
    return exchange


class Exchange(asyncio.Protocol):
    """The connection, from the request to the last byte of the response.

    `status` and `headers` are there after `head`. `received_at` is when the oldest byte that `read` returned last came
    (`time.perf_counter`).
    """

    def __init__(self, request: UpstreamRequest, where: str) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.received_at = 0.0
        self._request: UpstreamRequest | None = request
        self._has_body = request.method != b"HEAD"
        self._where = where
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._head_bytes = 0
        self._is_head_read = False
        self._is_delimited = False
        self._is_complete = False
        self._error: UpstreamError | None = None
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._is_paused = False
        self._first_at = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._closing: asyncio.TimerHandle | None = None

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError."""
        while not self._is_head_read:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; empty at its end.

        Raises:
            UpstreamError: the connection ended before the body did.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        self.received_at = self._first_at
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        """Close the connection: the engine sees its client leave. After a whole response it may close by itself."""
        if self._transport is not None and not self._is_complete:
            self._transport.abort()

    async def _wait(self) -> None:
        assert self._waiter is None, "one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, got: str) -> None:
        if self._error is None and not self._is_complete:
            self._error = UpstreamError(self._where, "a complete response", got, "retry; see the engine's log")
            self._wake()
        self.abort()

    # Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._request is not None
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not derived from it
        self._transport.write(self._request.encode())
        # The body may be large and the answer long.
        self._request = None

    def data_received(self, data: bytes) -> None:
        if self._is_complete or self._error is not None:
            return
        if not self._is_head_read:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"bytes that are not HTTP ({error})")
        if not self._is_head_read and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail(f"more than {_MAX_HEAD_BYTES} bytes of headers")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_head_read and not self._is_delimited and exc is None:
            self._complete()  # such a body ends with its connection
        self._fail("a connection that ended" if exc is None else f"a broken connection ({exc})")
        self._transport = None
        if self._closing is not None:
            self._closing.cancel()

    # Parser

    def on_message_begin(self) -> None:
        if not self._is_head_read:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a chunked body is no header.
        if not self._is_head_read:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return  # an interim response; another head follows
        if not 200 <= status < 600:
            self._fail(f"status {status}")
            return
        self.status = status
        self._is_delimited = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self._is_head_read = True
        self._wake()
        if not self._has_body:
            self._complete()

    def on_body(self, body: bytes) -> None:
        if not self._chunks:
            self._first_at = time.perf_counter()
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > _MAX_BUFFERED_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._is_head_read:
            self._complete()

    def _complete(self) -> None:
        self._is_complete = True
        self._wake()
        if self._transport is not None:
            self._closing = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._transport.abort)
