"""A gateway process with fake engines, and what tests ask about it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).parent
# No proxies of the environment, and no certificates, which take longer to read than a request.
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class GatewayProcess:
    """Models are given as name -> options of the fake engine, with `fields` of ModelConfig by name."""

    def __init__(
        self,
        directory: Path,
        models: dict[str, list[str]],
        *,
        fields: dict[str, dict[str, Any]] | None = None,
        http: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **gateway: Any,
    ):
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = directory / f"gateway-{self.port}.log"
        fake = [sys.executable, "-S", "-E", str(HERE / "fake_engine.py"), "--port", "${PORT}"]
        settings = {
            "gateway": {"port": self.port, **gateway},
            "http": http or {},
            "models": [
                {
                    "name": name,
                    "backend": "command",
                    "ready_path": "/health",
                    "command": [*fake, "--journal", str(self.journal_file(name)), *options],
                    **(fields or {}).get(name, {}),
                }
                for name, options in models.items()
            ],
        }
        command = [sys.executable, str(HERE / "run_gateway.py"), json.dumps(settings)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def journal_file(self, name: str) -> Path:
        return self.directory / f"journal-{self.port}-{name}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": 20, **PLAIN, **options})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10, **PLAIN, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **PLAIN, **options)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.01)
        raise AssertionError(f"{what} not seen in {seconds} s; log:\n{self.log()}")

    def wait_ready(self) -> GatewayProcess:
        def is_alive() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.get("/livez").status_code == 200
            assert self.process.poll() is None, self.log()
            return False

        self.wait(is_alive, "ready", seconds=60)  # a busy machine starts it slowly
        return self

    def journal(self, name: str, event: str) -> list[dict[str, Any]]:
        if not (file := self.journal_file(name)).exists():
            return []
        lines = file.read_text().splitlines()
        return [entry for line in lines if line.endswith("}") and (entry := json.loads(line))["event"] == event]

    def status(self, name: str) -> dict[str, Any]:
        return next(status for status in self.get("/models").json()["models"] if status["name"] == name)

    def engine_port(self, name: str) -> int:
        """Port of the engine of `name`, which is started if it has to be."""
        assert self.post("/models/load", {"model": name}).status_code == 200
        return int(self.journal(name, "started")[-1]["port"])

    def engine_state(self, name: str) -> dict[str, int]:
        port = self.journal(name, "started")[-1]["port"]
        counts: dict[str, int] = httpx.get(f"http://127.0.0.1:{port}/fake/state", **PLAIN).json()
        return counts

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def num_descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(10)
            self.process.kill()
        return self.process.wait()
