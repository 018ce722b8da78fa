"""Bounds of the gateway's HTTP side."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HttpSettings"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Bounds of the HTTP side. Times in seconds.

    api_key: every route but /livez asks for it when set.
    max_total_body_bytes: request bodies held in memory at one time, over all connections.
    header_timeout, body_idle_timeout, body_timeout, write_timeout: a slower client is cut off.
    progress_interval: silence of a stream that waits for its engine, after which a comment is sent. The first one
        begins the response: engines that are there sooner give status and headers themselves.
    response_header_timeout: how long an engine may take to begin its response; None: as long as its client waits.
    drain_timeout: how long running requests may go on after SIGTERM.
    """

    api_key: str | None = None
    max_body_bytes: int = 64 * _MIB
    max_total_body_bytes: int = 256 * _MIB
    max_header_bytes: int = 64 * 1024
    max_header_fields: int = 128
    max_connections: int = 4096
    header_timeout: float = 10.0
    body_idle_timeout: float = 10.0
    body_timeout: float = 120.0
    write_timeout: float = 60.0
    keep_alive_timeout: float = 30.0
    progress_interval: float = 5.0
    response_header_timeout: float | None = None
    drain_timeout: float = 60.0
