"""A `proa serve` of our own for the length of one conversation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from proa.cli.client import Endpoint
from proa.core import env
from proa.server import die_with_parent

__all__ = ["LocalServer", "local_server"]

_POLL_S = 0.1
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that is ready, and its API process."""

    endpoint: Endpoint
    pid: int


@contextmanager
def local_server(model: str, api_key: str | None = None, flags: Sequence[str] = ()) -> Iterator[LocalServer]:
    """Serve `model` on a free loopback port; stopped at the end, also when this process is killed.

    `flags` are further ones of `proa serve`. The server writes its loading progress and its errors to our stderr.

    Raises:
        typer.Exit: the server ended before it was ready, with its exit status; it has said why.
    """
    endpoint = Endpoint(f"http://127.0.0.1:{_free_port()}", api_key)
    process = _start(model, endpoint, flags)
    try:
        _wait_ready(process, endpoint)
        yield LocalServer(endpoint, process.pid)
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(model: str, endpoint: Endpoint, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    port = endpoint.root.rsplit(":", maxsplit=1)[1]
    # A session of its own: Ctrl-C in the terminal stops an answer, not the server.
    wrapper = [sys.executable, "-S", "-E", die_with_parent.__file__, str(os.getpid())]
    # -P: with -m alone Python would import from the working directory, which may be a model's.
    command = [sys.executable, "-P", "-m", "proa.cli.main", "serve", model]
    options = ["--port", port, "--log-level", "warning", *flags]
    return subprocess.Popen(
        [*wrapper, *command, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=env.child_environment(**({"PROA_API_KEY": endpoint.api_key} if endpoint.api_key else {})),
        start_new_session=True,
    )


def _wait_ready(process: subprocess.Popen[bytes], endpoint: Endpoint) -> None:
    import httpx  # here: it is slow to import, and `proa serve` does without

    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while process.poll() is None:
            try:
                if client.get(endpoint.url("/readyz"), headers=endpoint.headers()).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet, or busy loading: ask again
            time.sleep(_POLL_S)
    raise typer.Exit(process.returncode or 1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
