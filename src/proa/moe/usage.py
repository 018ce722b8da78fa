"""What is known of how a model uses its experts, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proa.moe.stats import ExpertStats, Recorder, RoutingCounts
from proa.moe.updates import ExpertUpdates

__all__ = ["ExpertUsage"]


class ExpertUsage:
    """The counts of a model's routers, recorded on request, and experts that follow them where these may move.

    Called between steps. `num_late`: how many slots have come a layer late so far; None: none ever do.
    """

    __slots__ = ("_counts", "_late_before", "_num_late", "_recorder", "_tokens", "_updates")

    def __init__(
        self,
        counts: RoutingCounts,
        updates: ExpertUpdates | None = None,
        num_late: Callable[[], int] | None = None,
    ) -> None:
        self._counts = counts
        self._updates = updates
        self._num_late = num_late
        self._late_before = 0
        self._recorder = Recorder(*counts.shape)
        self._tokens = 0

    @property
    def num_deferred(self) -> int:
        """Slots of tokens whose experts came one layer late since the last reset."""
        return 0 if self._num_late is None else self._num_late() - self._late_before

    @property
    def num_moved(self) -> int:
        """Experts that came to the GPU since loading."""
        return 0 if self._updates is None else self._updates.num_moved

    @property
    def updates(self) -> ExpertUpdates | None:
        """None where experts stay in their places."""
        return self._updates

    def reset(self) -> None:
        """Forgets what was counted: forwards that warmed up are no routing."""
        self._counts.take()
        self._late_before += self.num_deferred

    def after_step(self, tokens: int) -> None:
        """A step of `tokens` tokens is done: experts whose copies are there are switched, others begin to move."""
        self._tokens += tokens
        if self._updates is None:
            return
        self._updates.poll()
        if self._updates.wants_counts(self._tokens):
            self._updates.add(self._take())

    def start_recording(self) -> None:
        """Forgets what was recorded."""
        self._take()
        self._recorder.start()

    def stop_recording(self) -> None:
        """What was recorded stays until it is dumped or recording starts again."""
        self._take()
        self._recorder.stop()

    def dump(self) -> ExpertStats | None:
        """What was recorded, which is then forgotten; None when recording never started since the last time."""
        self._take()
        return self._recorder.dump()

    def _take(self) -> np.ndarray:
        counts = self._counts.take()
        self._recorder.add(counts)
        self._tokens = 0
        return counts
