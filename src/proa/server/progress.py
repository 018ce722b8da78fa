"""How far the prompt of a request has come, for the comments of a stream that has nothing else to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["PromptProgress"]


class PromptProgress:
    """Prompt tokens done of all sequences of a request, and how long the rest will take.

    Args:
        totals: sequence -> its prompt tokens.
        clock: seconds.
    """

    def __init__(self, totals: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._done = dict.fromkeys(totals, 0)
        self._clock = clock
        self._first = (clock(), 0)
        self._last: tuple[float, int] | None = None

    def advance(self, rid: str, tokens_done: int) -> None:
        """`rid` has come to `tokens_done`. What the prefix cache had counts, but not for the rate."""
        self._done[rid] = min(tokens_done, self._totals[rid])
        now = (self._clock(), sum(self._done.values()))
        if self._last is None:
            self._first = now
        self._last = now

    def finish(self, rid: str) -> None:
        """`rid` generates."""
        self._done[rid] = self._totals[rid]

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before there is one. Later chunks of a long prompt take longer than the first."""
        if self._last is None or self._last[1] <= self._first[1] or self._last[0] <= self._first[0]:
            return None
        rate = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        left = (sum(self._totals.values()) - self._last[1]) / rate
        return max(0.0, left - (self._clock() - self._last[0]))

    def __str__(self) -> str:
        done, total = sum(self._done.values()), sum(self._totals.values())
        if self._last is None:
            return f"waiting: prompt of {total} tokens"
        if done >= total:
            return "generating"
        left = self.seconds_left
        eta = "unknown" if left is None else f"{left:.0f} s"
        return f"prefill: {done} of {total} tokens, ETA {eta}"
