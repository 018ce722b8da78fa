"""A scheduler with a clock and engines that tests move by hand; it checks every effect it is given."""

from __future__ import annotations

from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.scheduler import Scheduler
from proa.gateway.slots import Grant, Halt, Launch, Refuse
from proa.gateway.state import State


class World:
    def __init__(self, *models: ModelConfig, **fields):
        self.config = GatewayConfig(models={model.name: model for model in models}, **fields)
        self.scheduler = Scheduler(self.config)
        self.now = 1000.0
        self.alive: dict[str, int] = {}  # model -> run of its process
        self.is_ready: set[str] = set()
        self.halting: set[str] = set()
        self.may_break: set[str] = set()  # models whose running requests may be cut off
        self.waiting: set[int] = set()
        self.granted: dict[int, tuple[str, int]] = {}
        self.refused: dict[int, Exception] = {}
        self.model_of: dict[int, str] = {}
        self.num_launches = 0
        self.memory: dict[str, dict[str, int] | None] = {}

    def request(self, name: str) -> int:
        """A ticket that is waiting or granted. Raises what the scheduler raises."""
        ticket = len(self.model_of)
        self.model_of[ticket] = name
        self.waiting.add(ticket)
        try:
            self.scheduler.request(ticket, name, self.now)
        except Exception:
            self.waiting.discard(ticket)
            raise
        finally:
            self.settle()
        return ticket

    def leave(self, ticket: int) -> None:
        self.waiting.discard(ticket)
        self.granted.pop(ticket, None)
        self.scheduler.leave(ticket, self.now)
        self.settle()

    def ready(self, name: str) -> None:
        self.is_ready.add(name)
        self.scheduler.ready(name, self.alive[name], self.now)
        self.settle()

    def end(self, name: str, reason: str = "exit status 1", *, noticed_first: bool = False) -> None:
        """The process of `name` is gone, halted or crashed. `noticed_first`: by its requests, before it is reported."""
        run = self.alive[name]
        if noticed_first:
            self._break_connections(name, run)
        del self.alive[name]
        self.is_ready.discard(name)
        self.halting.discard(name)
        self.may_break.discard(name)
        self.scheduler.ended(name, run, self.now, reason)
        self.settle()
        self._break_connections(name, run)

    def _break_connections(self, name: str, run: int) -> None:
        for ticket in [t for t, place in self.granted.items() if place == (name, run)]:
            self.leave(ticket)

    def fault(self, name: str) -> None:
        self.may_break.add(name)
        self.scheduler.fault(name, self.alive[name], self.now, "stalled")
        self.settle()

    def call(self, method: str, *arguments, breaks: str = "", **options) -> None:
        """A method of the scheduler that takes the time last."""
        if breaks:
            self.may_break.add(breaks)
        getattr(self.scheduler, method)(*arguments, self.now, **options)
        self.settle()

    def wait(self, seconds: float) -> None:
        """Time passes, with a tick whenever the scheduler asked for one."""
        end = self.now + seconds
        while (wakeup := self.scheduler.next_wakeup) is not None and wakeup <= end:
            assert wakeup > self.now
            self.now = wakeup
            self.scheduler.tick(self.now)
            self.settle()
        self.now = end

    def state(self, name: str) -> State:
        return self.scheduler.slots[name].life.state

    def settle(self) -> None:
        for effect in self.scheduler.take_effects():
            match effect:
                case Launch(model, run):
                    assert model.name not in self.alive, "one process per model"
                    self.alive[model.name] = run
                    self.memory[model.name] = model.memory
                    self.num_launches += 1
                case Halt(name, run):
                    assert self.alive[name] == run and name not in self.halting
                    self.halting.add(name)
                    is_cut_off = (name, run) in self.granted.values()
                    assert not is_cut_off or name in self.may_break, "a running request was lost"
                case Grant(ticket, name, run):
                    assert ticket in self.waiting and self.model_of[ticket] == name
                    assert self.alive[name] == run and name in self.is_ready and name not in self.halting
                    self.waiting.discard(ticket)
                    self.granted[ticket] = (name, run)
                case Refuse(ticket, error):
                    assert ticket in self.waiting
                    self.waiting.discard(ticket)
                    self.refused[ticket] = error
        self.check_limits()

    def check_limits(self) -> None:
        for resource, limit in self.config.memory_budget.items():
            assert sum((self.memory[name] or {}).get(resource, 0) for name in self.alive) <= limit
        assert len(self.alive) <= 1 or all(self.memory[name] is not None for name in self.alive)
        for group in self.config.groups.values():
            assert len(set(self.alive).intersection(group.members)) <= group.max_loaded
        for name, run in self.alive.items():
            if name in self.config.models:
                assert list(self.granted.values()).count((name, run)) <= self.config.models[name].max_running


def model(name, ram=10, **fields):
    return ModelConfig(name=name, memory={"ram": ram}, **fields)


def loaded(world, *names):
    """Each model started by a request that is over."""
    for name in names:
        ticket = world.request(name)
        world.ready(name)
        world.leave(ticket)
    return world


def reconfigured(world, *models, **fields):
    world.config = GatewayConfig(models={m.name: m for m in models}, **fields)
    world.call("reconfigure", world.config)
