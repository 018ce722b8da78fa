"""Runs the engines and decides which requests may use them: all that the HTTP side needs of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from proa.core import env
from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.errors import EngineFailedError, GatewayStoppingError, UnknownModelError
from proa.gateway.event_bus import EventBus
from proa.gateway.leases import Engine, Lease, Ticket
from proa.gateway.log_ring import LogRing
from proa.gateway.routing import names, resolve
from proa.gateway.state import Ended, Event, Lifecycle, Ready, Start, State, Stop, step
from proa.gateway.status import LoadProgress, ModelStatus

__all__ = ["Supervisor"]


class Supervisor:
    """The one owner of all engines. Everything runs on the event loop of `start`.

    Args:
        config: what to run.
        clock: seconds, growing.
    """

    def __init__(self, config: GatewayConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.events = EventBus()
        self._clock = clock
        self._models = {name: _Model(model, LogRing(config.log_lines)) for name, model in config.models.items()}
        self._closing = False

    async def start(self) -> None:
        """Load what is to be preloaded; returns at once."""

    async def close(self) -> None:
        """Refuse what waits, end every engine. Running requests should be over or are cut off."""
        self._closing = True
        for model in self._models.values():
            for ticket in model.waiting:
                ticket.refuse(GatewayStoppingError("", "one that shuts down", 5))
            model.waiting.clear()
            await self._stop(model, "the gateway shuts down")

    def ticket(self, name: str) -> Ticket:
        """Ask for the engine of a model or alias; it is started when it has to be.

        Raises:
            UnknownModelError: no such model or alias.
            QueueFullError: too many wait already.
            EngineUnavailableError: not now; the subclass says why, `retry_after_s` when to ask again.
        """
        route = resolve(self.config, name)
        if self._closing:
            raise GatewayStoppingError(name, "one that shuts down", 5)
        model = self._models[route.model.name]
        ticket = Ticket(route, lambda: model.progress, lambda: self._give_up(model, ticket))
        model.waiting.append(ticket)
        self._settle(model)
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

        Raises:
            UnknownModelError, EngineUnavailableError: as `ticket`, without limits on the queue.
        """
        with self.ticket(name) as ticket:
            await ticket.lease()

    async def unload(self, name: str, *, now: bool = False) -> None:
        """Stop the engine of a model; returns when it is gone. Running requests may finish first unless `now`.

        Raises:
            UnknownModelError: no such model.
        """
        del now
        await self._stop(self._models[resolve(self.config, name).model.name], "unloaded")

    def status(self) -> list[ModelStatus]:
        """Every model, in the order of the configuration."""
        return [model.status(self._clock()) for model in self._models.values()]

    def log(self, name: str) -> LogRing:
        """What the engines of a model wrote, whatever its state.

        Raises:
            UnknownModelError: no such model.
        """
        try:
            return self._models[resolve(self.config, name).model.name].log
        except KeyError:
            raise UnknownModelError(name, names(self.config)) from None

    async def reconfigure(self, config: GatewayConfig) -> None:
        """Take a new configuration. Running requests finish; engines whose start would differ are replaced."""
        self.config = config

    def _settle(self, model: _Model) -> None:
        now = self._clock()
        if model.life.may_start(now):
            self._step(model, Start(now))
            model.task = asyncio.create_task(self._run(model))
        if model.life.state is State.READY and model.engine is not None:
            for ticket in model.waiting:
                model.leased.add(ticket)
                ticket.grant(Lease(ticket.route, model.engine, ticket.close))
            model.waiting.clear()

    def _give_up(self, model: _Model, ticket: Ticket) -> None:
        model.leased.discard(ticket)
        if ticket in model.waiting:
            model.waiting.remove(ticket)

    async def _run(self, model: _Model) -> None:
        port = model.config.port or _free_port()
        values = {"${PORT}": str(port), "${HOST}": model.config.host, "${NAME}": model.config.name}
        command = [values.get(word, word) for word in (*model.config.command, *model.config.args)]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env.child_environment(**model.config.env),
            start_new_session=True,
        )
        model.process = process
        model.engine = Engine(f"http://{model.config.host}:{port}", {}, process.pid)
        reading = asyncio.create_task(_read(process, model.log))
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while process.returncode is None and model.life.state is State.STARTING:
                try:
                    answer = await client.get(model.engine.base_url + (model.config.ready_path or "/v1/models"))
                    if answer.status_code == 200:
                        self._step(model, Ready(model.life.run, self._clock()))
                        self._settle(model)
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.05)
        code = await process.wait()
        await reading
        model.engine.end_reason = f"ended with {code}"
        self._step(model, Ended(model.life.run, self._clock(), model.engine.end_reason))
        for ticket in model.waiting:
            retry = model.life.retry_at - self._clock()
            ticket.refuse(EngineFailedError(model.config.name, model.life.reason, retry))
        model.waiting.clear()

    async def _stop(self, model: _Model, reason: str) -> None:
        if model.process is not None and model.life.is_alive and model.task is not None:
            self._step(model, Stop(model.life.run, self._clock(), reason))
            if model.process.returncode is None:
                model.process.terminate()
            await model.task

    def _step(self, model: _Model, event: Event) -> None:
        model.life = step(model.life, event)
        self.events.publish("state", model.config.name, state=model.life.state.value, run=model.life.run)


class _Model:
    def __init__(self, config: ModelConfig, log: LogRing) -> None:
        self.config = config
        self.log = log
        self.life = Lifecycle()
        self.waiting: list[Ticket] = []
        self.leased: set[Ticket] = set()
        self.engine: Engine | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def progress(self) -> LoadProgress:
        return LoadProgress("ready" if self.life.state is State.READY else "loading")

    def status(self, now: float) -> ModelStatus:
        return ModelStatus(
            name=self.config.name,
            aliases=tuple(self.config.aliases),
            backend=self.config.backend,
            state=self.life.state,
            run=self.life.run,
            since=now - self.life.since,
            running=len(self.leased),
            waiting=len(self.waiting),
        )


async def _read(process: asyncio.subprocess.Process, log: LogRing) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        log.write(line.decode(errors="replace").rstrip("\r\n"))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
