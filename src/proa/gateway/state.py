"""The life of one model's engine as a pure function: `step(lifecycle, event) -> lifecycle`.

            Start                 Ready
  stopped ─────────▶ starting ───────────▶ ready
     ▲   ◀─┐             │ Stop, Ended        │ Stop, Ended
     │     └─ Ended ─ stopping ◀──────────────┤
   Start (after retry_at)  └─ Ended, at fault ─▶ failed

An engine that ends by itself, or is stopped because it is at fault (stalled), has failed. Each failure in a row
doubles the pause before the next start. Events carry the number of their run; those of an earlier run change nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = ["Ended", "Event", "Forgive", "Lifecycle", "Ready", "Start", "State", "Stop", "backoff", "step"]

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0


class State(enum.StrEnum):
    """Where an engine stands. Only READY takes requests."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """One model's engine.

    Attributes:
        run: number of the current or last start.
        since: when this state began, seconds.
        failures: failed runs in a row.
        retry_at: FAILED only: no start before.
        reason: why it is stopping, stopped or failed.
        at_fault: STOPPING only: its end counts as a failure.
    """

    state: State = State.STOPPED
    run: int = 0
    since: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""
    at_fault: bool = False

    def may_start(self, now: float) -> bool:
        """Whether `Start` is allowed."""
        return self.state is State.STOPPED or (self.state is State.FAILED and now >= self.retry_at)

    @property
    def is_alive(self) -> bool:
        """Whether there may be a process."""
        return self.state in {State.STARTING, State.READY, State.STOPPING}


@dataclass(frozen=True, slots=True)
class Start:
    """Start the engine: a new run."""

    now: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine of `run` answered its ready check."""

    run: int
    now: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine of `run` is to end. `at_fault`: because something is wrong with it."""

    run: int
    now: float
    reason: str
    at_fault: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing is left of the engine of `run`."""

    run: int
    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Forgive:
    """What failed may be started at once, and a new row of failures begins."""

    now: float


Event = Start | Ready | Stop | Ended | Forgive


def backoff(failures: int) -> float:
    """Seconds to wait after the given number of failures in a row, 1 or more: 10, 20, 40 ... 300."""
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S) if failures < 10 else LONGEST_PAUSE_S


def step(life: Lifecycle, event: Event) -> Lifecycle:
    """What becomes of `life`. Events that do not belong to its run or state change nothing."""
    match event:
        case Start(now):
            if not life.may_start(now):
                return life
            return Lifecycle(State.STARTING, life.run + 1, now, life.failures)
        case Ready(run, now):
            if run != life.run or life.state is not State.STARTING:
                return life
            return replace(life, state=State.READY, since=now)
        case Stop(run, now, reason, at_fault):
            if run != life.run or life.state not in {State.STARTING, State.READY}:
                return life
            # A run that served, and that nothing is wrong with, ends the row of failures.
            failures = 0 if life.state is State.READY and not at_fault else life.failures
            return Lifecycle(State.STOPPING, run, now, failures, reason=reason, at_fault=at_fault)
        case Ended(run, now, reason):
            if run != life.run or not life.is_alive:
                return life
            if life.state is State.STOPPING and not life.at_fault:
                return Lifecycle(State.STOPPED, run, now, life.failures, reason=life.reason)
            # One that served for longer than the longest pause begins a new row.
            was_stable = life.state is State.READY and now - life.since > LONGEST_PAUSE_S
            failures = 1 if was_stable else life.failures + 1
            why = life.reason or reason
            return Lifecycle(State.FAILED, run, now, failures, now + backoff(failures), why)
        case _:
            return Lifecycle(State.STOPPED, life.run, event.now) if life.state is State.FAILED else life
