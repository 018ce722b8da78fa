"""How loading looks: a bar with bytes, GB/s and the time left on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import time

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from proa.cli import console
from proa.server.engine_process import EngineState, EngineStatus

__all__ = ["ByteDisplay", "EngineDisplay"]

_log = logging.getLogger("proa.cli")
_LOG_EVERY_S = 5.0


class _BytesColumn(ProgressColumn):
    """Bytes and the mean rate since the start of the stage."""

    def render(self, task: Task) -> Text:
        rate = f"{task.completed / task.elapsed / 1e9:.2f} GB/s" if task.elapsed else ""
        return Text(
            f"{task.completed / 1e9:.2f} of {(task.total or 0) / 1e9:.2f} GB  {rate}", style="progress.download"
        )


class ByteDisplay:
    """Shows work that is counted in bytes, stage by stage. Used by one thread."""

    def __init__(self, *, terminal: bool | None = None) -> None:
        self._terminal = console.err.is_terminal if terminal is None else terminal
        self._bar: Progress | None = None
        self._stage = ""
        self._started_s = self._logged_s = 0.0

    def update(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of `total_bytes` of `stage` are done; a new name begins a new stage."""
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._started_s = self._logged_s = time.monotonic()
        if self._terminal:
            self._draw(done_bytes, total_bytes)
        else:
            self._write(done_bytes, total_bytes)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._stage = ""

    def _draw(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), _BytesColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console.err, transient=True)
            self._bar.add_task(self._stage, total=total_bytes)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done_bytes, total=total_bytes)

    def _write(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = now
        rate = done_bytes / (now - self._started_s)
        left_s = max(total_bytes - done_bytes, 0) / rate if rate else float("inf")
        done_gb, total_gb = done_bytes / 1e9, total_bytes / 1e9
        _log.info("%s: %.2f of %.2f GB, %.2f GB/s, %.0f s left", self._stage, done_gb, total_gb, rate / 1e9, left_s)


class EngineDisplay:
    """Takes every status of the engine process; shows loading, and one log line when it is done."""

    def __init__(self, display: ByteDisplay) -> None:
        self._display = display
        self._loading_since_s: float | None = None
        self._weight_bytes = 0

    def __call__(self, status: EngineStatus) -> None:
        if status.state is EngineState.LOADING:
            if self._loading_since_s is None:
                self._loading_since_s = time.monotonic()
            self._weight_bytes = status.bytes_total
            self._display.update("loading weights", status.bytes_done, status.bytes_total)
            return
        if self._loading_since_s is not None:
            self._display.close()
            if status.state is EngineState.READY:
                seconds = max(time.monotonic() - self._loading_since_s, 1e-9)
                gigabytes = self._weight_bytes / 1e9
                _log.info("loaded %.2f GB in %.1f s (%.2f GB/s)", gigabytes, seconds, gigabytes / seconds)
            self._loading_since_s = None
