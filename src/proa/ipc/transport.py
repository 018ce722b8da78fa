"""The two ends of the link between API process and engine process: two one-way ZMQ queues over unix sockets.

The API process binds both addresses inside a private directory, the engine connects: first the inbox, then the outbox,
so that its first message tells that both are connected and the directory may go. Payloads are msgpack of the unions
in `proa.ipc.messages`; anything else is logged and dropped. Queues are bounded: a full one blocks the sender, so a
stalled API process stops the engine instead of filling memory.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from proa.core.errors import ConfigError
from proa.ipc.messages import FromEngine, ToEngine

__all__ = ["ClientEndpoint", "EngineAddresses", "EngineEndpoint"]

logger = logging.getLogger("proa.ipc")

_HIGH_WATER_MARK = 10_000
_LINGER_MS = 1_000
# sun_path of a unix socket holds 107 bytes and a terminator.
_MAX_SOCKET_PATH = 107
# Containers nested thousands deep raise RecursionError.
_UNREADABLE = (msgspec.MsgspecError, RecursionError)


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """Where one engine process and its client meet. Every engine process gets fresh ones: nothing stale is queued."""

    to_engine: str
    from_engine: str

    @staticmethod
    def in_directory(directory: Path, name: str = "engine") -> EngineAddresses:
        """Addresses in `directory`, which must be the user's own with mode 0700 (sockets inherit its protection)."""
        status = directory.stat()
        if status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise ConfigError(
                "ipc", f"a directory of mode 0700 owned by uid {os.getuid()}", f"{directory} {status.st_mode:o}"
            )
        paths = [str(directory / f"{name}-{suffix}.sock") for suffix in ("in", "out")]
        if max(len(os.fsencode(path)) for path in paths) > _MAX_SOCKET_PATH:
            raise ConfigError(
                "ipc", f"socket paths of at most {_MAX_SOCKET_PATH} bytes", paths[0], "set TMPDIR to a shorter path"
            )
        return EngineAddresses(f"ipc://{paths[0]}", f"ipc://{paths[1]}")


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    return socket


class EngineEndpoint:
    """The engine's end: synchronous, used by one thread."""

    def __init__(self, addresses: EngineAddresses) -> None:
        self._context = zmq.Context(io_threads=1)
        self._inbox = _socket(self._context, zmq.PULL)
        self._outbox = _socket(self._context, zmq.PUSH)
        self._inbox.connect(addresses.to_engine)
        self._outbox.connect(addresses.from_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def poll(self, timeout_s: float) -> bool:
        """Sleep until a message is there or the time is over; True when there is one."""
        return bool(self._inbox.poll(timeout_s * 1000.0))

    def receive(self) -> list[ToEngine]:
        """Every message that has arrived, without waiting."""
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(data))
            except _UNREADABLE as error:
                logger.warning("dropped a message of %d bytes: %s", len(data), error)

    def send(self, message: FromEngine) -> None:
        """Queue `message`; waits while the queue is full."""
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        """Flush for at most a second, then close."""
        self._inbox.close()
        self._outbox.close()
        self._context.term()


class ClientEndpoint:
    """The API process's end: asyncio. `send` and `receive` may be used by different tasks, each by one at a time."""

    def __init__(self, addresses: EngineAddresses) -> None:
        self._addresses = addresses
        self._context = zmq.asyncio.Context(io_threads=1)
        self._outbox = _socket(self._context, zmq.PUSH)
        self._inbox = _socket(self._context, zmq.PULL)
        # Nobody reads what was queued for a dead engine.
        self._outbox.setsockopt(zmq.LINGER, 0)
        self._outbox.bind(addresses.to_engine)
        self._inbox.bind(addresses.from_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    async def send(self, message: ToEngine) -> None:
        """Queue `message`; waits while no engine is connected or the queue is full."""
        await self._outbox.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        """The next message of the engine."""
        while True:
            data = await self._inbox.recv()
            try:
                return self._decoder.decode(data)
            except _UNREADABLE as error:
                logger.warning("dropped a message of %d bytes: %s", len(data), error)

    def close(self) -> None:
        """Drop what is queued, close, remove the socket files. A pending `receive` is cancelled."""
        self._outbox.close()
        self._inbox.close()
        self._context.term()
        for address in (self._addresses.to_engine, self._addresses.from_engine):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
