"""The response to a client: begun once, by an engine's head, by a comment of a held stream, or by an error."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.types import Message, Scope, Send

from proa.gateway.headers import is_event_stream, response_headers
from proa.gateway.upstream import Header
from proa.server.errors import error_response, error_shape

__all__ = ["Reply"]

_BODILESS = (204, 304)
_HELD_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply:
    """One response. Never ended, the HTTP server closes its connection, and it looks as broken as it is."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._is_started = False
        self._takes_events = False
        self._last_bytes = b"\n\n"
        self.is_held = False

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Begin with an engine's head; a held stream has its own."""
        if self.is_held:
            return
        passed = response_headers(headers)
        if status in _BODILESS:
            # Its length is that of another response.
            passed = [header for header in passed if header[0] != b"content-length"]
        self._is_started = True
        is_plain = all(name != b"content-encoding" for name, _ in passed)
        self._takes_events = is_plain and is_event_stream(passed)
        await self._send({"type": "http.response.start", "status": status, "headers": passed})

    async def write(self, data: bytes) -> None:
        """Send bytes of the body."""
        self._last_bytes = data[-2:] if len(data) > 1 else self._last_bytes[-1:] + data
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The body is complete."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def comment(self, text: str) -> None:
        """A line that readers of event streams pass over. The first begins the response: from then on it is held."""
        if not self._is_started:
            self._is_started = self.is_held = self._takes_events = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HELD_HEADERS})
        await self.write(f": {text}\n\n".encode())

    async def refuse(self, body: bytes) -> None:
        """End a held stream with the body of an engine's response that is no stream."""
        try:
            compact = msgspec.json.encode(msgspec.json.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            text = body[:1000].decode(errors="replace")
            compact = msgspec.json.encode({"error": {"message": text, "type": "upstream_error"}})
        await self._end_with(compact)

    async def fail(self, error: Exception) -> None:
        """End with `error`, in the shape of the API the request came to."""
        if not self._is_started:
            self._is_started = True
            response = error_response(error, self._scope["path"])
            await response(self._scope, _nothing_to_receive, self._send)
        elif self._takes_events and self._last_bytes == b"\n\n":
            await self._end_with(msgspec.json.encode(error_shape(self._scope["path"])(error)))
        # Else the error would be read as part of something: the response stays incomplete.

    async def _end_with(self, data: bytes) -> None:
        name = b"event: error\n" if self._scope["path"].startswith(("/v1/messages", "/v1/responses")) else b""
        await self.write(b"%bdata: %b\n\n" % (name, data))
        await self.end()


async def _nothing_to_receive() -> Message:
    raise AssertionError("a response that is complete reads nothing")
