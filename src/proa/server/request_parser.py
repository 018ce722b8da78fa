"""A parser of HTTP/1.1 requests that passes over offers to upgrade.

A client may offer another protocol with any request (`Upgrade: h2c`, as Java's HttpClient does), and a server that
ignores the offer answers the request as it is (RFC 9110, 7.8). httptools ends a message at the offer, before its body:
here a second parser, told how the body is framed, reads on.
"""

from __future__ import annotations

from typing import Protocol

import httptools

__all__ = ["RequestEvents", "RequestParser"]

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RequestEvents(Protocol):
    """What the parser calls, in the order of a message."""

    def on_message_begin(self) -> None: ...

    def on_url(self, url: bytes) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class RequestParser:
    """The part of httptools' HttpRequestParser that servers use. `feed_data` raises its HttpParserError."""

    def __init__(self, events: RequestEvents) -> None:
        self._events = events
        self._framing: list[tuple[bytes, bytes]] = []
        self._is_offered = False  # an upgrade, with the message that is being parsed
        self._is_repeating = False  # headers that were told already
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parse what follows the data before."""
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[int(offer.args[0]) :]
                self._read_on()
            else:
                return

    def get_http_version(self) -> str:
        """Such as "1.1"."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Such as b"POST"."""
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """Whether the connection may take another message."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def on_message_begin(self) -> None:
        if not self._is_repeating:
            self._framing.clear()
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeating:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeating:
            return
        if name.lower() in _FRAMING:
            self._framing.append((name, value))
        self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_repeating:
            self._is_offered = bool(self._parser.should_upgrade())
            self._events.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._events.on_body(body)

    def on_message_complete(self) -> None:
        # At an offer the parser takes the message for complete whatever its framing says.
        if not (self._is_offered and self._framing):
            self._events.on_message_complete()

    def _read_on(self) -> None:
        self._is_offered = False
        self._parser = self._new_parser()
        if self._framing:
            head = b"".join(b"%s: %s\r\n" % field for field in self._framing)
            self._is_repeating = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")
            self._is_repeating = False

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Blank lines after a message that ends its connection are no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser
