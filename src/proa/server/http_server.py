"""The HTTP server of a process that handles signals itself, and the socket it listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from proa.core.errors import ConfigError
from proa.server.http_protocol import ConnectionLimits, LimitedProtocol

__all__ = ["HttpServer", "base_url", "bind", "http_server", "is_loopback"]

# After draining: how long connections may take to close.
_CLOSE_SECONDS = 3
_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: signals start a drain instead."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def http_server(
    app: ASGIApp,
    limits: ConnectionLimits,
    keep_alive_timeout: float,
    on_started: Callable[[], None],
    *,
    log_level: str = "error",
    date_header: bool = True,
) -> HttpServer:
    """A server for `app`, to be run with `serve(sockets=[bind(...)])`."""
    config = uvicorn.Config(
        app,
        http=partial(LimitedProtocol, limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        # It warns about every malformed request, which anyone can send.
        log_level=log_level,
        access_log=False,
        server_header=False,
        date_header=date_header,
        backlog=_BACKLOG,
        timeout_keep_alive=keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    return HttpServer(config, on_started)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address is taken, or is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            "host and port", "an address that is free", f"{host}:{port} ({error})", "choose another --host or --port"
        ) from error
    listener.setblocking(False)
    return listener


def base_url(listener: socket.socket) -> str:
    """URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
