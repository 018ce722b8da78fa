"""Runs the engines and decides which requests may use them: all that the HTTP side needs of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.engine_run import EngineRun, RunReports
from proa.gateway.errors import EngineStartingError, GatewayStoppingError
from proa.gateway.event_bus import EventBus
from proa.gateway.leases import Engine, Lease, Ticket
from proa.gateway.log_ring import LogRing
from proa.gateway.routing import Route, resolve
from proa.gateway.scheduler import Scheduler
from proa.gateway.slots import Grant, Halt, Launch, Refuse, Slot
from proa.gateway.state import Lifecycle, State
from proa.gateway.status import LoadProgress, ModelStatus

__all__ = ["Supervisor"]

_PROGRESS_EVENT_S = 1.0


class Supervisor:
    """The one owner of all engines: it does what the scheduler decides. Everything runs on the event loop of `start`.

    Args:
        config: what to run.
        clock: seconds, growing.
    """

    def __init__(self, config: GatewayConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.events = EventBus()
        self._clock = clock
        self._scheduler = Scheduler(config)
        self._logs: dict[str, LogRing] = {}
        self._runs: dict[str, EngineRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._usual_seconds: dict[str, float] = {}
        self._published: dict[str, Lifecycle] = {}
        self._progress_at: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._installing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Load what is to be preloaded; returns at once."""
        for model in self.config.models.values():
            if model.preload:
                self._scheduler.load(model.name, self._clock())
        self._apply()

    async def close(self) -> None:
        """Refuse what waits, end every engine. Running requests should be over or are cut off."""
        self._is_closing = True
        self._scheduler.close(self._clock())
        self._apply()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._timer is not None:
            self._timer.cancel()

    def ticket(self, name: str) -> Ticket:
        """Ask for the engine of a model or alias; it is started when it has to be.

        Raises:
            UnknownModelError: no such model or alias.
            QueueFullError: too many wait already.
            EngineUnavailableError: not now; the subclass says why, `retry_after_s` when to ask again.
        """
        route = resolve(self.config, name)
        ticket = self._new_ticket(route)
        try:
            self._scheduler.request(ticket, route.model.name, self._clock())
        except EngineStartingError as error:
            self._apply()
            if (eta := self._progress(route.model.name).eta) is None:
                raise
            raise EngineStartingError(route.model.name, error.got, eta) from None
        finally:
            self._apply()
        return ticket

    async def acquire(self, name: str) -> Lease:
        """`ticket` and `lease` in one, for callers that show no progress. The lease must be released."""
        ticket = self.ticket(name)
        try:
            return await ticket.lease()
        except BaseException:
            ticket.close()
            raise

    async def load(self, name: str) -> None:
        """Start the engine of a model; returns when it is ready. Ends a pause after failures.

        Cancelling this leaves the load going.

        Raises:
            UnknownModelError, EngineUnavailableError: as `ticket`, without limits on the queue.
        """
        route = resolve(self.config, name)
        model = route.model.name
        if self._is_closing:
            raise GatewayStoppingError(model, "one that shuts down", 5)
        self._scheduler.load(model, self._clock())
        with self._new_ticket(route) as ticket:
            if self._scheduler.slots[model].life.state is not State.READY:
                self._scheduler.enqueue(ticket, model, self._clock())
                self._apply()
                await ticket.lease()

    async def unload(self, name: str, *, now: bool = False) -> None:
        """Stop the engine of a model; returns when it is gone. Running requests may finish first unless `now`.

        Raises:
            UnknownModelError: no such model.
        """
        slot = self._scheduler.slots[resolve(self.config, name).model.name]
        run = slot.life.run
        self._scheduler.unload(slot.config.name, self._clock(), at_once=now)
        self._apply()
        while slot.life.is_alive and slot.life.run == run:
            await self._changed.wait()

    def status(self) -> list[ModelStatus]:
        """Every model, in the order of the configuration; last those that were removed from it and still end."""
        return [self._status(slot) for slot in self._scheduler.slots.values()]

    def log(self, name: str) -> LogRing:
        """What the engines of a model wrote, whatever its state.

        Raises:
            UnknownModelError: no such model.
        """
        return self._log(resolve(self.config, name).model.name)

    async def reconfigure(self, config: GatewayConfig) -> None:
        """Take a new configuration. Running requests finish; engines whose start would differ are replaced."""
        before, self.config = self.config, config
        self._scheduler.reconfigure(config, self._clock())
        for model in config.models.values():
            if model.preload and model.name not in before.models:
                self._scheduler.load(model.name, self._clock())
        for name in self._logs.keys() - self._scheduler.slots.keys():
            del self._logs[name]
        self.events.publish("config", ok=True, source=config.source)
        self._apply()

    def _new_ticket(self, route: Route) -> Ticket:
        def give_up() -> None:
            self._scheduler.leave(ticket, self._clock())
            self._apply()

        ticket = Ticket(route, lambda: self._progress(route.model.name), give_up)
        return ticket

    def _apply(self) -> None:
        """Do what the scheduler has decided, tell of it, and wake it when it wants to be woken."""
        while effects := self._scheduler.take_effects():
            for effect in effects:
                match effect:
                    case Launch(model, run):
                        self._launch(model, run)
                    case Halt(model, _):
                        self._runs[model].halt()
                    case Grant(Ticket() as ticket, model, _):
                        ticket.grant(Lease(ticket.route, self._engine(model), ticket.close))
                    case Refuse(Ticket() as ticket, error):
                        ticket.refuse(error)
                    case _:
                        raise AssertionError(f"tickets are Tickets, got {effect}")
        self._publish()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (wakeup := self._scheduler.next_wakeup) is not None:
            delay = max(0.0, wakeup - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._scheduler.tick(self._clock())
        self._apply()

    def _launch(self, model: ModelConfig, number: int) -> None:
        name = model.name

        def ready() -> None:
            now = self._clock()
            self._usual_seconds[name] = now - self._scheduler.slots[name].life.since
            self._scheduler.ready(name, number, now)
            self._apply()

        def stalled(reason: str) -> None:
            self._scheduler.fault(name, number, self._clock(), reason)
            self._apply()

        async def follow() -> None:
            reason = await run.run()
            del self._runs[name]
            self._scheduler.ended(name, number, self._clock(), reason)
            self._apply()

        run = self._runs[name] = EngineRun(
            model,
            self._log(name),
            RunReports(ready, stalled, partial(self._publish_progress, name)),
            self._clock,
            installing=self._installing,
            usual_seconds=self._usual_seconds.get(name),
        )
        task = asyncio.create_task(follow())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _engine(self, model: str) -> Engine:
        engine = self._runs[model].engine
        assert engine is not None, "granted before it was ready"
        return engine

    def _log(self, model: str) -> LogRing:
        if model not in self._logs:
            self._logs[model] = LogRing(self.config.log_lines)
        return self._logs[model]

    def _progress(self, model: str) -> LoadProgress:
        run = self._runs.get(model)
        slot = self._scheduler.slots.get(model)
        if run is None or slot is None or slot.life.state not in {State.STARTING, State.READY}:
            return LoadProgress()
        return run.progress

    def _publish(self) -> None:
        lives = {name: slot.life for name, slot in self._scheduler.slots.items()}
        for name, life in lives.items():
            if life != self._published.get(name, Lifecycle()):
                self.events.publish("state", name, state=life.state.value, run=life.run, reason=life.reason)
        self._published = lives
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _publish_progress(self, name: str, progress: LoadProgress) -> None:
        now = self._clock()
        if now - self._progress_at.get(name, -_PROGRESS_EVENT_S) >= _PROGRESS_EVENT_S:
            self._progress_at[name] = now
            self.events.publish("progress", name, **asdict(progress), fraction=progress.fraction)

    def _status(self, slot: Slot) -> ModelStatus:
        now = self._clock()
        config, life = slot.config, slot.life
        run = self._runs.get(config.name)
        engine = None if run is None else run.engine
        is_idle = life.state is State.READY and not slot.num_running and not slot.waiting
        return ModelStatus(
            name=config.name,
            aliases=tuple(config.aliases),
            backend=config.backend,
            state=life.state,
            run=life.run,
            since=now - life.since if life.run else 0.0,
            pid=0 if engine is None else engine.pid,
            base_url="" if engine is None else engine.base_url,
            running=slot.num_running,
            waiting=len(slot.waiting),
            failures=life.failures,
            retry_after=max(0.0, life.retry_at - now) if life.state is State.FAILED else 0.0,
            reason=slot.no_room or life.reason,
            progress=None if run is None or life.state is not State.STARTING else run.progress,
            idle=now - max(slot.idle_since, life.since) if is_idle else None,
            pinned=config.pin,
            memory=config.memory,
        )
