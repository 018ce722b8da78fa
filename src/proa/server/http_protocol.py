"""uvicorn's HTTP protocol with limits on header size, header time and body time.

uvicorn waits for ever for the rest of a request and takes headers of any size. Here every connection is in one of
three phases, each with a deadline: headers (from the first byte, or from connecting), body, response. Responses are
bounded by their own write timeout, or by that of the connection where it has one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from proa.server.errors import error_body
from proa.server.request_parser import RequestParser

__all__ = ["ConnectionLimits", "LimitedProtocol"]

# How long a refused client is listened to after the answer: closing at once would reset the connection under it.
_LINGER_SECONDS = 2.0
_MESSAGES = {
    400: "invalid HTTP request",
    408: "the request did not arrive in time",
    431: "the request's headers are too large",
    503: "too many connections",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bytes, fields and seconds; `max_connections` over the whole server.

    write_timeout: how long a client may leave a full send buffer; None: responses see to it themselves.
    """

    max_header_bytes: int
    max_header_fields: int
    max_connections: int
    header_timeout: float
    body_idle_timeout: float
    body_timeout: float
    write_timeout: float | None = None


class _HeadersTooLargeError(Exception):
    """Raised inside a parser callback, which ends parsing."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)  # type: ignore[assignment]  # all of it that uvicorn uses
        self._limits = limits
        self._in_headers = False
        self._unparsed_bytes = 0
        self._field_bytes = 0
        self._num_fields = 0
        self._is_refused = False
        self._refusal = 400
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_started = 0.0
        self._last_data = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503)
        else:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._last_data = self.loop.time()
        self._unparsed_bytes += len(data)
        super().data_received(data)
        # The parser keeps an unfinished field to itself, so what it was fed since the last complete part counts.
        if self._in_headers and self._unparsed_bytes > self._limits.max_header_bytes:
            self._refuse(431)
        elif self._is_idle:
            self._start_header_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._limits.write_timeout is not None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the reason is in _refusal
        self._refuse(self._refusal)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._field_bytes = 0
        self._num_fields = 0
        self._start_header_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._count(len(name) + len(value))
        # What follows a chunked body is no header (RFC 9110, 6.5.1): nobody has checked it.
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._unparsed_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._body_started = self._last_data
        self._body_timer = self.loop.call_later(self._limits.body_idle_timeout, self._check_body)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits for its response. uvicorn has no cycle before the first request."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _count(self, num_bytes: int) -> None:
        self._field_bytes += num_bytes
        limits = self._limits
        if self._field_bytes > limits.max_header_bytes or self._num_fields > limits.max_header_fields:
            self._refusal = 431
            raise _HeadersTooLargeError

    def _start_header_timer(self) -> None:
        if self._header_timer is None and not self._is_refused:
            self._header_timer = self.loop.call_later(self._limits.header_timeout, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._in_headers:
            self._refuse(408)
        elif self._is_idle:
            # Nothing was asked: nothing is answered.
            self.transport.close()

    def _check_body(self) -> None:
        """The body is still incomplete: has it stopped coming, or come for too long?"""
        now = self.loop.time()
        limits = self._limits
        if self.flow.read_paused:
            self._last_data = now
        if self._is_idle:
            # Already answered (too large, no key): the rest of the body is not waited for.
            self.transport.close()
        elif now - self._last_data >= limits.body_idle_timeout or now - self._body_started >= limits.body_timeout:
            self._refuse(408)
        else:
            delay = min(self._last_data + limits.body_idle_timeout, self._body_started + limits.body_timeout) - now
            self._body_timer = self.loop.call_later(max(delay, 0.01), self._check_body)

    def _refuse(self, status: int) -> None:
        """Answer with `status`, listen a little longer, close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timers()
        self._unset_keepalive_if_required()
        response_started = False
        if not self._is_idle:
            response_started = self.cycle.response_started
            # The application sees that the client is gone and writes nothing more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if response_started:
            self.transport.close()
            return
        body = msgspec.json.encode(error_body(_MESSAGES[status], status))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._body_timer = self._write_timer = None
