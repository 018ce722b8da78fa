"""Whether a start makes progress, how far it is and how long it will take. Pure: every call says what time it is."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

from proa.gateway.status import LoadProgress, Phase

__all__ = ["LoadWatch"]

_WINDOW_S = 30.0
_RECENT_LINES = 64
# Between two looks, a second apart: a process that hangs still reads a little, our questions for instance.
_LEAST_READ = 64 * 1024
# Dates and times of day, which make each heartbeat line a new one.
_CLOCK = re.compile(r"\d{2,4}-\d\d-\d\d|\d\d-\d\d(?= \d\d:)|\d{1,2}:\d\d:\d\d([.,]\d+)?")


class LoadWatch:
    """Follows one start.

    Progress is any of: bytes the engine reports, bytes its processes read, a line it did not write a moment ago (but
    for the time of day). A start without it for `stall_timeout` seconds is stalled, however long it takes in all.

    Args:
        started: seconds.
        usual: seconds the last successful start took.

    Attributes:
        bytes_total: size of the weights, None when unknown; what the engine reports goes before it.
    """

    def __init__(self, started: float, stall_timeout: float, *, usual: float | None = None) -> None:
        self.phase: Phase = "checking"
        self._started = started
        self._stall_timeout = stall_timeout
        self._usual = usual
        self.bytes_total: int | None = None
        self._done: int | None = None
        self._is_reported = False
        self._progress_at = started
        self._line = ""
        self._recent: deque[str] = deque(maxlen=_RECENT_LINES)
        self._samples: deque[tuple[float, int]] = deque()
        self._read_by: dict[int, int] = {}
        self._read = 0

    def enter(self, phase: Phase, now: float) -> None:
        """The next phase, which is progress."""
        self.phase = phase
        self._progress_at = now

    def saw_line(self, line: str, now: float) -> None:
        """The engine wrote a line."""
        self._line = line
        bare = _CLOCK.sub("", line)
        if bare not in self._recent:
            self._recent.append(bare)
            self._progress_at = now

    def saw_report(self, done: int, total: int, now: float) -> None:
        """The engine says how many bytes of how many it has loaded."""
        if not self._is_reported:
            self._is_reported = True
            self._samples.clear()
            self._done = None
        self.bytes_total = total
        self._advance(done, now)

    def saw_reads(self, read_by: Mapping[int, int], now: float) -> None:
        """Bytes each of its processes (by id) has read since its start. Processes come and go."""
        grown = sum(max(0, read - self._read_by.get(pid, 0)) for pid, read in read_by.items())
        self._read_by = dict(read_by)
        self._read += grown
        if grown < _LEAST_READ:
            return
        self._progress_at = now
        if not self._is_reported and self.bytes_total:
            # More may be read than the weights, or the same twice: that it is all there only the ready check knows.
            self._advance(min(self._read, int(0.99 * self.bytes_total)), now)

    def stalled_for(self, now: float) -> float | None:
        """Seconds without progress once they are too many, else None."""
        silent = now - self._progress_at
        return silent if silent >= self._stall_timeout else None

    def progress(self, now: float) -> LoadProgress:
        """What there is to show."""
        return LoadProgress(self.phase, now - self._started, self._done, self.bytes_total, self._eta(now), self._line)

    def _advance(self, done: int, now: float) -> None:
        if self._done is None or done > self._done:
            self._progress_at = now
        self._done = done
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[0][0] < now - _WINDOW_S:
            self._samples.popleft()

    def _eta(self, now: float) -> float | None:
        """From the rate of the last half minute; before there is one, from the last start."""
        if self.phase not in {"checking", "loading"}:
            return None
        if self.bytes_total and len(self._samples) > 1:
            (first, before), (last, done) = self._samples[0], self._samples[-1]
            if last > first and done > before:
                return max(0.0, (self.bytes_total - done) * (last - first) / (done - before) - (now - last))
        return None if self._usual is None else max(0.0, self._usual - (now - self._started))
