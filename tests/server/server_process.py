"""A `serve` process with the fake engine, and what tests ask about it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
KEY = "test-key"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """`serve` with the fake engine in a process of its own."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        server: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        engine_script: str = "fake_engine.py",
        log_level: str = "debug",
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.journal_file = directory / f"journal-{self.port}"
        self.log_file = directory / f"log-{self.port}"
        settings = {
            "server": {
                "model_path": str(model),
                "port": self.port,
                "served_model_name": "tiny",
                "api_key": KEY,
                **(server or {}),
            },
            "engine_command": [sys.executable, str(HERE / engine_script)],
            "log_level": log_level,
            "engine": {"journal": str(self.journal_file), **(engine or {})},
        }
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "run_server.py"), json.dumps(settings)], stdout=log, stderr=log
            )

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {KEY}"}

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "headers": self.headers, "timeout": 20, **options})

    def wait(self, condition: Callable[[], Any], seconds: float = 15.0, what: str = "condition") -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.01)
        raise AssertionError(f"{what} not met in {seconds} s; log:\n{self.log()}")

    def status(self, path: str = "/readyz") -> int | None:
        try:
            return httpx.get(self.url + path, headers=self.headers, timeout=5).status_code
        except httpx.TransportError:
            return None

    def wait_ready(self) -> ServerProcess:
        self.wait(lambda: self.status() == 200, seconds=60, what="ready")  # a busy machine starts it slowly
        return self

    def journal(self, event: str) -> list[dict[str, Any]]:
        if not self.journal_file.exists():
            return []
        lines = self.journal_file.read_text().splitlines()
        return [entry for line in lines if line.endswith("}") and (entry := json.loads(line))["event"] == event]

    def engine_pid(self) -> int:
        return int(self.journal("started")[-1]["pid"])

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def rss_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def exit_code(self, seconds: float = 10.0) -> int:
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
