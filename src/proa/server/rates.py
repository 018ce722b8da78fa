"""Rates from totals that grow: over windows of a second or more, so that one step does not make them jump."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Rate"]

_WINDOW_S = 1.0


class Rate:
    """Growth of one total per growth of another over the last window in which the latter grew.

    `value`: the rate, 0 before the first window. `clock`: seconds, between updates.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._since = clock()
        self._base = (0.0, 0.0)
        self.value = 0.0

    def update(self, amount: float, per: float | None = None) -> None:
        """Totals by now. `per` None: seconds of the clock. Totals that fell start a new window."""
        now = self._clock()
        if per is None:
            per = now - self._started
        if amount < self._base[0] or per < self._base[1]:
            self._since, self._base = now, (amount, per)
        if now - self._since < _WINDOW_S:
            return
        if per > self._base[1]:
            self.value = (amount - self._base[0]) / (per - self._base[1])
        self._since, self._base = now, (amount, per)
