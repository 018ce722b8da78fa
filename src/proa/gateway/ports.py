"""TCP ports of this machine: a free one, and who listens on one."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port", "is_free", "is_listener"]

_LISTEN = "0A"


def free_port(host: str) -> int:
    """A port that nobody listens on now. Somebody may take it before it is used."""
    with _socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether one could listen on it."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # On some systems two may bind as long as neither listens.
            probe.listen(1)
        except OSError:
            return False
    return True


def is_listener(processes: Iterable[int], port: int) -> bool | None:
    """Whether one of the processes listens on the port; None when that cannot be told."""
    try:
        wanted = _listening_inodes(port)
    except OSError:
        return None
    if not wanted:
        return None
    for pid in processes:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(link.readlink()) in wanted:
                        return True
    return False


def _listening_inodes(port: int) -> set[str]:
    """What descriptors of sockets that listen on the port link to."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
