"""What the scheduler knows of a model, and what it wants done."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from proa.gateway.config import ModelConfig
from proa.gateway.state import Lifecycle

__all__ = ["Effect", "Grant", "Halt", "Launch", "Refuse", "Slot"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the engine of a model; tell `ready`, `fault` and `ended`."""

    model: ModelConfig
    run: int


@dataclass(frozen=True, slots=True)
class Halt:
    """End the engine of a run; tell `ended`."""

    model: str
    run: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A ticket has a place at the engine of a run until `leave`."""

    ticket: Hashable
    model: str
    run: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """A ticket gets no place."""

    ticket: Hashable
    error: Exception


Effect = Launch | Halt | Grant | Refuse


@dataclass(slots=True)
class Slot:
    """All that is known of one model.

    Attributes:
        config: what is or would be run; next_config: what comes after an outdated engine has gone.
        waiting: ticket -> when it came, in order. running: ticket -> run it was granted.
        wanted_since: to be loaded whether or not anybody waits, None if not.
        leaves_at: it takes no more requests and ends at this time at the latest, None if it stays; leave_reason: why.
        no_room: why it could not be loaded when it was last asked for, empty when it could.
        unwanted_since, idle_since: when the last ticket left the queue, the engine.
        served: requests granted in this run.
    """

    config: ModelConfig
    life: Lifecycle = field(default_factory=Lifecycle)
    next_config: ModelConfig | None = None
    is_removed: bool = False
    waiting: dict[Hashable, float] = field(default_factory=dict)
    running: dict[Hashable, int] = field(default_factory=dict)
    wanted_since: float | None = None
    leaves_at: float | None = None
    leave_reason: str = ""
    no_room: str = ""
    unwanted_since: float = 0.0
    idle_since: float = 0.0
    served: int = 0

    @property
    def num_running(self) -> int:
        """Requests at this run's engine; those of an engine that has ended fail by themselves."""
        return sum(run == self.life.run for run in self.running.values())

    @property
    def asked_since(self) -> float | None:
        """When the oldest of those who want it asked, None when nobody does."""
        return min((t for t in (*self.waiting.values(), self.wanted_since) if t is not None), default=None)
