"""Who gets which engine when. No clock, no I/O, no tasks: every call says what time it is and leaves effects to take.

Rules, in the order in which `_settle` applies them:

1. An engine that is to go (unloaded, removed, outdated) goes when its requests are done or its deadline is over.
2. Models that are asked for and not running get their memory in the order of their oldest request. A later one may go
   first only where that delays no earlier one.
3. A model whose place another waits for takes the requests that came until `patience` after the other's oldest; the
   rest waits for its next turn. So two models in turn cost two swaps a round, and nobody waits forever.
4. A load nobody waits for is given up, an idle engine unloaded, after their times.

A request ends in `Grant` or `Refuse`, or by leaving. Decisions are made here and only here: a state read outside is
advice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf

from proa.core.errors import QueueFullError
from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.errors import (
    EngineCoolingDownError,
    EngineFailedError,
    EngineStartingError,
    GatewayStoppingError,
    NoRoomError,
    UnknownModelError,
)
from proa.gateway.policy import Limits, Resident, fits, make_room
from proa.gateway.routing import names
from proa.gateway.slots import Effect, Grant, Halt, Launch, Refuse, Slot
from proa.gateway.state import Ended, Event, Forgive, Ready, Start, State, Stop, step

__all__ = ["Scheduler"]

# A model that was loaded without anybody waiting (preloaded, or asked for by a client that was told to come back) is
# left alone for so long, so that whoever wanted it finds it.
UNUSED_GRACE_S = 30.0
_RETRY_S = 5.0


class Scheduler:
    """The state of all models. Methods that change it leave what is to be done in `take_effects`."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._limits = Limits(config.memory_budget, tuple(config.groups.values()))
        self._slots = {name: Slot(model) for name, model in config.models.items()}
        self._tickets: dict[Hashable, Slot] = {}
        self._effects: list[Effect] = []
        self._deadlines: list[float] = []
        # Models whose place is waited for -> until when a request must have come to be taken.
        self._horizons: dict[str, float] = {}
        self._is_closing = False

    @property
    def slots(self) -> dict[str, Slot]:
        """For reading only; also models that were removed and still end."""
        return self._slots

    @property
    def next_wakeup(self) -> float | None:
        """When `tick` is due, None if only events matter."""
        return min(self._deadlines, default=None)

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; each is handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def request(self, ticket: Hashable, model: str, now: float) -> None:
        """A ticket asks for a model of the configuration.

        Raises:
            QueueFullError, EngineUnavailableError: it is not taken in.
        """
        slot = self._slots[model]
        life = slot.life
        if self._is_closing:
            raise GatewayStoppingError(model, "one that shuts down", _RETRY_S)
        if life.state is State.FAILED and not life.may_start(now):
            raise EngineCoolingDownError(model, f"none: {life.reason}", life.retry_at - now)
        if slot.config.while_starting == "refuse" and not self._takes_requests(slot, now):
            self._want(slot, now)
            self._settle(now)
            if slot.no_room:
                raise _no_room(slot)
            got = "one that leaves" if slot.life.state is State.READY else f"one that is {slot.life.state}"
            raise EngineStartingError(model, got, _RETRY_S)
        if self._must_wait(slot) and len(slot.waiting) >= slot.config.max_waiting:
            raise QueueFullError(slot.config.max_waiting + slot.config.max_running)
        self.enqueue(ticket, model, now)

    def enqueue(self, ticket: Hashable, model: str, now: float) -> None:
        """As `request`, whatever the queue is like."""
        slot = self._slots[model]
        slot.waiting[ticket] = now
        self._tickets[ticket] = slot
        self._settle(now)

    def leave(self, ticket: Hashable, now: float) -> None:
        """A ticket gives up its place in the queue or at the engine, if it has one."""
        if (slot := self._tickets.pop(ticket, None)) is None:
            return
        if ticket in slot.waiting:
            del slot.waiting[ticket]
            slot.unwanted_since = now
        else:
            del slot.running[ticket]
            slot.idle_since = now
        self._settle(now)

    def load(self, model: str, now: float) -> None:
        """Load a model whether or not anybody waits; a pause after failures ends."""
        slot = self._slots[model]
        self._step(slot, Forgive(now))
        self._want(slot, now)
        self._settle(now)

    def unload(self, model: str, now: float, *, at_once: bool = False) -> None:
        """Stop the engine of a model: when its requests are done, or `at_once`. What waits for its start is refused."""
        slot = self._slots[model]
        slot.wanted_since = None
        if slot.life.state is State.READY:
            self._let_go(slot, now if at_once else now + slot.config.drain_timeout, "unloaded")
        else:
            self._refuse_waiting(slot, EngineFailedError(model, "one that was unloaded", _RETRY_S))
            self._halt(slot, now, "unloaded")
        self._settle(now)

    def ready(self, model: str, run: int, now: float) -> None:
        """The engine of `run` takes requests."""
        slot = self._slots[model]
        if self._step(slot, Ready(run, now)):
            slot.wanted_since = None
            slot.idle_since = now
            slot.served = 0
        self._settle(now)

    def fault(self, model: str, run: int, now: float, reason: str) -> None:
        """The engine of `run` is broken and has to be ended."""
        slot = self._slots[model]
        self._halt(slot, now, reason, run=run, at_fault=True)
        self._settle(now)

    def ended(self, model: str, run: int, now: float, reason: str) -> None:
        """Nothing is left of the engine of `run`."""
        slot = self._slots[model]
        if not self._step(slot, Ended(run, now, reason)):
            return
        slot.leaves_at = None
        slot.idle_since = now
        if slot.next_config is not None:
            slot.config, slot.next_config = slot.next_config, None
        if slot.life.state is State.FAILED:
            slot.wanted_since = None
            error = EngineFailedError(model, f"one that failed: {slot.life.reason}", slot.life.retry_at - now)
            self._refuse_waiting(slot, error)
            if slot.config.pin and not slot.is_removed and not self._is_closing:
                self._want(slot, now)
        if slot.is_removed:
            del self._slots[model]
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._settle(now)

    def reconfigure(self, config: GatewayConfig, now: float) -> None:
        """Take a new configuration. What is running stays until its requests are done."""
        self._config = config
        self._limits = Limits(config.memory_budget, tuple(config.groups.values()))
        for name, model in config.models.items():
            if name in self._slots:
                self._replace(self._slots[name], model, now)
        for slot in list(self._slots.values()):
            if slot.config.name not in config.models:
                self._remove(slot, now)
        # The order of the configuration is the order in which models are shown; what still ends comes last.
        kept = self._slots
        self._slots = {name: kept.get(name) or Slot(model) for name, model in config.models.items()}
        self._slots.update((name, slot) for name, slot in kept.items() if name not in self._slots)
        self._settle(now)

    def close(self, now: float) -> None:
        """Take no more requests, refuse what waits, end every engine at once."""
        self._is_closing = True
        for slot in self._slots.values():
            slot.wanted_since = None
            self._refuse_waiting(slot, GatewayStoppingError(slot.config.name, "one that shuts down", _RETRY_S))
            self._halt(slot, now, "the gateway shuts down")
        self._settle(now)

    # Changes of one slot.

    def _step(self, slot: Slot, event: Event) -> bool:
        before, slot.life = slot.life, step(slot.life, event)
        return slot.life is not before

    def _want(self, slot: Slot, now: float) -> None:
        if slot.life.state is not State.READY and slot.wanted_since is None:
            slot.wanted_since = now

    def _takes_requests(self, slot: Slot, now: float) -> bool:
        is_ready = slot.life.state is State.READY and slot.leaves_at is None
        return is_ready and now <= self._horizons.get(slot.config.name, inf)

    def _must_wait(self, slot: Slot) -> bool:
        is_full = slot.num_running >= slot.config.max_running
        return slot.life.state is not State.READY or is_full or bool(slot.waiting) or slot.leaves_at is not None

    def _halt(self, slot: Slot, now: float, reason: str, *, run: int | None = None, at_fault: bool = False) -> None:
        run = slot.life.run if run is None else run
        if self._step(slot, Stop(run, now, reason, at_fault)):
            self._effects.append(Halt(slot.config.name, run))

    def _let_go(self, slot: Slot, at: float, reason: str) -> None:
        slot.leaves_at = at if slot.leaves_at is None else min(at, slot.leaves_at)
        slot.leave_reason = reason

    def _refuse_waiting(self, slot: Slot, error: Exception) -> None:
        for ticket in slot.waiting:
            del self._tickets[ticket]
            self._effects.append(Refuse(ticket, error))
        slot.waiting.clear()

    def _replace(self, slot: Slot, config: ModelConfig, now: float) -> None:
        slot.is_removed = False
        is_same = config.launches_like(slot.config)
        if not slot.life.is_alive:
            if not is_same:
                self._step(slot, Forgive(now))
            slot.config = config
        elif slot.life.state is State.STOPPING or slot.leaves_at is not None:
            slot.next_config = config
        elif is_same:
            slot.config = config
        else:
            slot.next_config = config
            self._end_gently(slot, now, "its configuration changed")

    def _remove(self, slot: Slot, now: float) -> None:
        slot.is_removed = True
        slot.wanted_since = None
        self._refuse_waiting(slot, UnknownModelError(slot.config.name, names(self._config)))
        if not slot.life.is_alive:
            del self._slots[slot.config.name]
        else:
            self._end_gently(slot, now, "it was removed from the configuration")

    def _end_gently(self, slot: Slot, now: float, reason: str) -> None:
        if slot.life.state is State.STARTING:
            self._halt(slot, now, reason)
        else:
            self._let_go(slot, now + slot.config.drain_timeout, reason)

    # Decisions.

    def _settle(self, now: float) -> None:
        self._deadlines = []
        for slot in self._slots.values():
            self._end_what_leaves(slot, now)
        self._horizons = self._start_what_is_asked_for(now)
        for slot in self._slots.values():
            self._grant(slot, self._horizons.get(slot.config.name, inf))
            self._end_what_nobody_wants(slot, now)

    def _is_due(self, at: float, now: float) -> bool:
        if now >= at:
            return True
        self._deadlines.append(at)
        return False

    def _end_what_leaves(self, slot: Slot, now: float) -> None:
        if slot.leaves_at is not None and (slot.num_running == 0 or self._is_due(slot.leaves_at, now)):
            self._halt(slot, now, slot.leave_reason)

    def _start_what_is_asked_for(self, now: float) -> dict[str, float]:
        """Launch what fits, make room for the first that does not; returns the horizons of those that have to go."""
        blocked: list[Resident] = []
        horizons: dict[str, float] = {}
        for since, slot in self._asked_for(now):
            horizon = since + self._config.patience
            target = Resident(slot.config.name, slot.config.memory)
            residents = list(self._residents(now, horizon))
            room = make_room(target, residents, self._limits)
            slot.no_room = room.reason
            if room.kind == "never":
                slot.wanted_since = None
                self._refuse_waiting(slot, _no_room(slot))
                continue
            later = [r for r in residents if r.name not in horizons] + blocked
            if room.kind == "free" and fits(target, later, self._limits):
                self._step(slot, Start(now))
                self._effects.append(Launch(slot.config, slot.life.run))
                continue
            if not blocked:
                horizons = dict.fromkeys(room.going, horizon)
            if not blocked and room.kind == "evict":
                for name in room.idle:
                    self._halt(self._slots[name], now, f"making room for {slot.config.name}")
            blocked.append(target)
        return horizons

    def _asked_for(self, now: float) -> list[tuple[float, Slot]]:
        asked = []
        for slot in self._slots.values():
            since, life = slot.asked_since, slot.life
            if since is not None and not life.is_alive and self._is_due(life.retry_at, now):
                asked.append((since, slot))
        return sorted(asked, key=lambda pair: pair[0])

    def _residents(self, now: float, horizon: float) -> Iterator[Resident]:
        """What holds memory. A ready model is busy while it has requests or may still take some that wait."""
        for slot in self._slots.values():
            life = slot.life
            if not life.is_alive:
                continue
            is_fresh = life.state is State.READY and not slot.served
            in_grace = is_fresh and not self._is_due(life.since + UNUSED_GRACE_S, now)
            takes_more = any(since <= horizon for since in slot.waiting.values())
            is_busy = life.state is State.STARTING or bool(slot.num_running) or takes_more or in_grace
            yield Resident(
                slot.config.name,
                slot.config.memory,
                life.since if is_busy else slot.idle_since,
                is_pinned=slot.config.pin and slot.leaves_at is None,
                is_busy=is_busy,
                is_leaving=life.state is State.STOPPING,
            )

    def _grant(self, slot: Slot, horizon: float) -> None:
        if slot.life.state is not State.READY or slot.leaves_at is not None:
            return
        free = slot.config.max_running - slot.num_running
        for ticket, since in list(slot.waiting.items())[: max(0, free)]:
            if since > horizon:
                break
            del slot.waiting[ticket]
            slot.running[ticket] = slot.life.run
            slot.served += 1
            self._effects.append(Grant(ticket, slot.config.name, slot.life.run))

    def _end_what_nobody_wants(self, slot: Slot, now: float) -> None:
        config, life = slot.config, slot.life
        if slot.waiting or slot.num_running or slot.wanted_since is not None:
            return
        if life.state is State.STARTING:
            patience, since, reason = config.cancel_load_after, slot.unwanted_since, "nobody waited for it any more"
        elif life.state is State.READY and not config.pin:
            patience, since, reason = config.ttl, slot.idle_since, f"idle for {config.ttl} s"
        else:
            return
        if patience is not None and self._is_due(max(since, life.since) + patience, now):
            self._halt(slot, now, reason)


def _no_room(slot: Slot) -> NoRoomError:
    fix = "unpin another model, raise memory_budget or state what the model really needs"
    return NoRoomError(slot.config.name, f"none: {slot.no_room}", 60.0, fix)
