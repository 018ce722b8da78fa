"""What is known of how a model uses its experts, and what follows from it."""

from __future__ import annotations

import numpy as np
import torch

from proa.moe.stats import ExpertStats, Recorder, RoutingCounts
from proa.moe.updates import ExpertUpdates

__all__ = ["ExpertUsage"]

READ_INTERVAL = 16  # tokens


class ExpertUsage:
    """The counts of a model's routers, recorded on request, and experts that follow them where these may move.

    Called between steps. `deferred`: int64 on the device, slots whose experts came a layer late.
    """

    __slots__ = ("_counts", "_deferred", "_deferred_tokens", "_recorder", "_tokens", "_updates", "num_deferred")

    def __init__(
        self, counts: RoutingCounts, updates: ExpertUpdates | None = None, deferred: torch.Tensor | None = None
    ) -> None:
        self._counts = counts
        self._updates = updates
        self._deferred = deferred
        self._recorder = Recorder(*counts.shape)
        self._tokens = 0
        self._deferred_tokens = 0
        self.num_deferred = 0

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
        if self._deferred is not None:
            self._deferred.zero_()

    def after_step(self, tokens: int) -> None:
        """A step of `tokens` tokens is done: experts whose copies are there are switched, others begin to move."""
        self._tokens += tokens
        self._count_deferred(tokens)
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

    def _count_deferred(self, tokens: int) -> None:
        """Reads the device's count now and then: each time waits for it."""
        if self._deferred is None:
            return
        self._deferred_tokens += tokens
        if self._deferred_tokens >= READ_INTERVAL:
            self._deferred_tokens = 0
            self.num_deferred = int(self._deferred)
