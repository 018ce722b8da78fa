"""A real `proa serve demo`: real process, real engine, real weights."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
import pytest

READY_S = 180.0


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self) -> openai.OpenAI:
        """A client, closed with the server; its streams too, wherever a test left them."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0)
        self.clients.append(client)
        return client

    def end(self) -> None:
        """Kill the server if it still runs, and close what its clients hold."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for client in self.clients:
            client.close()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=10.0, trust_env=False)

    def engine_pid(self) -> int:
        """The API process has one child: the engine."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def wait_status(self, path: str, status: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.get(path).status_code == status:
                    return
            except httpx.TransportError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.05)
        raise AssertionError(f"{path} did not answer {status} in {seconds} s:\n{self.log.read_text()[-4000:]}")


def start(command: list[str], log: Path) -> Server:
    """Start `command --port FREE` and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *command, "--port", str(port)], stdout=file, stderr=file)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    server.wait_status("/readyz", 200, READY_S)
    return server


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A function that starts a server of its own for one test; killed at the end if it still runs."""
    servers: list[Server] = []

    def start_one(*command: str) -> Server:
        server = start(list(command) or ["-m", "proa.cli.main", "serve", "demo"], tmp_path / f"{len(servers)}.log")
        servers.append(server)
        return server

    yield start_one
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module. It has to end with status 0 on SIGTERM."""
    server = start(["-m", "proa.cli.main", "serve", "demo"], tmp_path_factory.mktemp("serve") / "log")
    try:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, server.log.read_text()[-4000:]
    finally:
        server.end()
