"""Models served by the fake engine, and what tests ask about its processes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from proa.gateway.config import ModelConfig

FAKE = Path(__file__).with_name("fake_engine.py")
# -S -E: it starts in a third of the time.
PYTHON = (sys.executable, "-S", "-E")


class FakeModel:
    """A model of backend `command`, or another one that gets the fake engine as its program, with its journal."""

    def __init__(self, directory: Path, name: str = "m", *options: str, backend: str = "command", **fields):
        self.journal_file = directory / f"journal-{name}"
        command = (*PYTHON, str(FAKE), "--journal", str(self.journal_file), *options)
        if backend == "command":
            command = (*command, "--port", "${PORT}", "--name", "${NAME}")
            fields = {"ready_path": "/health", **fields}
        else:
            fields = {"path": str(directory), **fields}
        self.config = ModelConfig(
            name=name, backend=backend, command=command, **{"stop_timeout": 5.0, "memory": {}, **fields}
        )

    def journal(self, event: str) -> list[dict]:
        if not self.journal_file.exists():
            return []
        lines = self.journal_file.read_text().splitlines()
        return [entry for line in lines if (entry := json.loads(line))["event"] == event]

    @property
    def pids(self) -> list[int]:
        """All processes it ever had."""
        return [e["pid"] for e in self.journal("started")] + [e["child"] for e in self.journal("forked")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds: float = 30.0, what: str = "condition"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} not met in {seconds} s"
        time.sleep(0.01)
    return value


async def until(condition, seconds: float = 30.0, what: str = "condition"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} not met in {seconds} s"
        await asyncio.sleep(0.01)
    return value
