"""systemd's notification protocol (sd_notify(3)): datagrams of NAME=VALUE lines to a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from proa.core import env

__all__ = ["notify", "ping_watchdog"]

logger = logging.getLogger("proa.gateway")


def notify(state: str) -> bool:
    """Tell systemd, such as "READY=1", "STOPPING=1" or "STATUS=...". False: it does not ask, or does not listen."""
    address = env.notify_socket()
    if address is None:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("systemd cannot be told %s: %s", state, error)
        return False
    return True


async def ping_watchdog() -> None:
    """Tell systemd that this event loop runs, twice per watchdog interval; returns at once when it does not ask."""
    interval = env.watchdog_interval()
    if interval is None:
        return
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            notify("WATCHDOG=1")
            await asyncio.sleep(interval / 2)
