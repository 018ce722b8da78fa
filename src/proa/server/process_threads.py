"""What the threads of a process are doing, for the log of one that hangs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["describe_threads"]

_MAX_THREADS = 64
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def describe_threads(pid: int, root: Path = Path("/proc")) -> str:
    """Name, state (R runs, S sleeps, D waits for a device, T stopped), CPU seconds of each; "none" once it is gone."""
    found = []
    try:
        for task in sorted((root / str(pid) / "task").iterdir(), key=lambda path: int(path.name))[:_MAX_THREADS]:
            # The name stands in parentheses and may hold any character.
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(") ")
            values = fields.split()
            seconds = (int(values[11]) + int(values[12])) / _TICKS_PER_SECOND
            found.append(f"{name} {values[0]} {seconds:.1f} s")
    except OSError:
        pass  # it ended meanwhile
    return ", ".join(found) or "none"
