"""What experts shared by CPU and GPU have done, for the snapshots of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proa.moe.traffic import HybridTraffic

__all__ = ["HybridReport"]

_PERIOD_S = 1.0


class HybridReport:
    """Asks every layer once a second, not at every step. `clock`: seconds."""

    def __init__(self, source: Callable[[], HybridTraffic | None], clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._asked = float("-inf")
        self._streamed: dict[str, Any] = {}

    def fields(self) -> dict[str, Any]:
        """Of `EngineStats`; `expert_slots` only where they are new."""
        now = self._clock()
        if now - self._asked < _PERIOD_S:
            return self._streamed
        self._asked = now
        found = self._source()
        if found is None:
            return {}
        self._streamed = {"streamed_bytes": found.streamed_bytes, "streamed_ms": found.streamed_seconds * 1e3}
        return {"expert_slots": found.slots, **self._streamed}
