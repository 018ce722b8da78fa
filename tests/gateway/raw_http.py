"""HTTP by hand: what is on the wire, compared byte by byte."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "date"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def end_to_end(self) -> list[tuple[str, str]]:
        """Headers that are the engine's to say; those that a gateway adds are not among them."""
        return sorted(h for h in self.headers if h[0] not in HOP | {"x-request-id", "x-accel-buffering"})


def request(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def connect(port: int, path: str, body: Any, *, method: str = "POST", **headers: str) -> socket.socket:
    """Send a request and leave the answer to the caller. `headers`: with _ for -."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.sendall(request(method, path, raw, named))
    return connection


def call(port: int, path: str, body: Any, *, method: str = "POST", **headers: str) -> Answer:
    with connect(port, path, body, method=method, **headers) as connection:
        return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    """The one answer on a connection, which ends with it."""
    return _read(lambda: connection.recv(65536))


def parse_answer(data: bytes) -> Answer:
    """The first answer in `data`."""
    return _read(iter([data, b""]).__next__)


def _read(receive: Callable[[], bytes]) -> Answer:
    data = b""

    def more() -> bytes:
        if not (piece := receive()):
            raise EOFError("the answer broke off")
        return piece

    while b"\r\n\r\n" not in data:
        data += more()
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name.lower(), value.strip()) for name, value in (line.split(":", 1) for line in lines)]
    by_name = dict(headers)
    if by_name.get("transfer-encoding") == "chunked":
        body = _dechunk(more, rest)
    else:
        length = int(by_name.get("content-length", "0"))
        while len(rest) < length:
            rest += more()
        body = rest[:length]
    return Answer(int(first.split()[1]), headers, body)


def _dechunk(more: Callable[[], bytes], data: bytes) -> bytes:
    body = b""
    while True:
        while b"\r\n" not in data:
            data += more()
        size, _, data = data.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        while len(data) < length + 2:
            data += more()
        if length == 0:
            return body
        body += data[:length]
        data = data[length + 2 :]
