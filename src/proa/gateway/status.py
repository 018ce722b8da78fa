"""What observers see: progress of a load, a model's status, events. Values only; `msgspec.to_builtins` makes JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from proa.gateway.state import State

__all__ = ["GatewayEvent", "LoadProgress", "ModelStatus", "Phase"]

# waiting: not started yet, another model has to leave first; checking: what the engine can do; installing: auto_build.
Phase = Literal["waiting", "checking", "installing", "loading", "ready"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a start has come. Unknown numbers are None.

    Attributes:
        phase: what happens now.
        elapsed: seconds since the start, 0 while waiting.
        bytes_done, bytes_total: of the weights.
        eta: seconds until the engine is ready.
        line: the last thing the engine wrote.
    """

    phase: Phase = "waiting"
    elapsed: float = 0.0
    bytes_done: int | None = None
    bytes_total: int | None = None
    eta: float | None = None
    line: str = ""

    @property
    def fraction(self) -> float | None:
        """Part that is done, 0 to 1."""
        if self.phase == "ready":
            return 1.0
        if not self.bytes_total or self.bytes_done is None:
            return None
        return min(1.0, self.bytes_done / self.bytes_total)

    def __str__(self) -> str:
        if self.phase != "loading":
            return self.phase
        part = "" if self.fraction is None else f" {100 * self.fraction:.0f} %"
        left = "" if self.eta is None else f", ETA {self.eta:.0f} s"
        return f"loading{part} after {self.elapsed:.0f} s{left}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model as `status` shows it.

    Attributes:
        run: number of the current or last start; 0: never started.
        since: seconds in this state.
        running: requests the engine has; waiting: requests held here.
        failures: failed runs in a row; retry_after: seconds until the next start is allowed, 0 when it is.
        reason: why it failed or was stopped.
        progress: of the start, None unless it starts.
        idle: seconds since the last request ended, None while there are any or when it is not ready.
    """

    name: str
    aliases: tuple[str, ...]
    backend: str
    state: State
    run: int = 0
    since: float = 0.0
    pid: int = 0
    base_url: str = ""
    running: int = 0
    waiting: int = 0
    failures: int = 0
    retry_after: float = 0.0
    reason: str = ""
    progress: LoadProgress | None = None
    idle: float | None = None
    pinned: bool = False
    memory: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class GatewayEvent:
    """Something that happened.

    kind: "state" (data: state, run, reason), "progress" (data: phase, fraction, eta ...), "config" (data: error or ok).
    at: seconds since the epoch. number: grows by one with each event, so that a gap shows.
    """

    number: int
    at: float
    kind: Literal["state", "progress", "config"]
    model: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
