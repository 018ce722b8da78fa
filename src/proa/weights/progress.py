"""How far a load is: bytes, GB/s and time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LoadProgress", "LoadStatus"]


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """One report. Rates are means since the start."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float
    stage: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.done_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.bytes_per_s / 1e9

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the mean rate; None while nothing is read yet."""
        rate = self.bytes_per_s
        return max(self.total_bytes - self.done_bytes, 0) / rate if rate > 0 else None

    def __str__(self) -> str:
        left = "" if self.eta_s is None or self.done_bytes >= self.total_bytes else f", {self.eta_s:.0f} s left"
        return (
            f"{self.stage}: {self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB in {self.elapsed_s:.1f} s, "
            f"{self.gb_per_s:.2f} GB/s{left}"
        )


class LoadProgress:
    """Counts bytes and calls `callback` at most every `interval_s` seconds, and once at the end. Thread-safe."""

    def __init__(
        self,
        callback: Callable[[LoadStatus], None] | None = None,
        *,
        interval_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._callback = callback
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self.start(0)

    def start(self, total_bytes: int, stage: str = "") -> None:
        """Begin a stage of `total_bytes`; counts and clock restart."""
        with self._lock:
            self._done = 0
            self._total = total_bytes
            self._stage = stage
            self._started = self._last_report = self._clock()

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more are done."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._last_report < self._interval_s:
                return
            self._last_report = now
            self._report(now)

    def finish(self) -> None:
        """The stage is over: the last report, however recent the one before."""
        with self._lock:
            self._report(self._clock())

    @property
    def status(self) -> LoadStatus:
        with self._lock:
            return self._status(self._clock())

    def _status(self, now: float) -> LoadStatus:
        return LoadStatus(self._done, self._total, now - self._started, self._stage)

    def _report(self, now: float) -> None:
        if self._callback is not None:
            self._callback(self._status(now))
