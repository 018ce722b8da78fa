"""Random events: one process per model, budgets kept, no running request cut off, every request ends."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scheduler_world import World

from proa.core.errors import QueueFullError
from proa.gateway.config import Group, ModelConfig
from proa.gateway.errors import EngineUnavailableError
from proa.gateway.state import State

MODELS = (
    ModelConfig(name="small", memory={"ram": 20, "gpu": 1}, ttl=20, max_running=2, max_waiting=3),
    ModelConfig(name="medium", memory={"ram": 50, "gpu": 3}, cancel_load_after=None, max_running=1, drain_timeout=15),
    ModelConfig(name="large", memory={"ram": 80, "gpu": 4}, cancel_load_after=0.0),
    ModelConfig(name="whole", memory=None, while_starting="refuse"),
    ModelConfig(name="pinned", memory={"ram": 15, "gpu": 1}, pin=True, preload=True),
    ModelConfig(name="in-group", memory={"ram": 1, "gpu": 1}, ttl=5),
    ModelConfig(name="in-group-too", memory={"ram": 1, "gpu": 1}),
)
LIMITS = {
    "memory_budget": {"ram": 100, "gpu": 6},
    "groups": {"g": Group(members=("in-group", "in-group-too"))},
    "patience": 3.0,
}
NAMES = st.sampled_from([model.name for model in MODELS])


class RandomEvents(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(*MODELS, **LIMITS)

    @rule(name=NAMES, count=st.integers(1, 4))
    def request(self, name, count):
        for _ in range(count):
            if name in self.world.scheduler.slots and name in self.world.config.models:
                with contextlib.suppress(EngineUnavailableError, QueueFullError):
                    self.world.request(name)

    @rule(data=st.data())
    def leave(self, data):
        if tickets := sorted(self.world.waiting | set(self.world.granted)):
            self.world.leave(data.draw(st.sampled_from(tickets)))

    @rule(data=st.data())
    def ready(self, data):
        world = self.world
        if starting := sorted(set(world.alive) - world.halting - world.is_ready):
            world.ready(data.draw(st.sampled_from(starting)))

    @rule(data=st.data())
    def end(self, data):
        if alive := sorted(self.world.alive):
            self.world.end(data.draw(st.sampled_from(alive)), noticed_first=data.draw(st.booleans()))

    @rule()
    def what_is_halted_ends(self):
        for name in sorted(self.world.halting):
            self.world.end(name)

    @rule(data=st.data())
    def fault(self, data):
        if alive := sorted(set(self.world.alive) - self.world.halting):
            self.world.fault(data.draw(st.sampled_from(alive)))

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 400.0]))
    def wait(self, seconds):
        self.world.wait(seconds)

    @rule(name=NAMES)
    def load(self, name):
        if name in self.world.config.models:
            self.world.call("load", name)

    @rule(name=NAMES, at_once=st.booleans())
    def unload(self, name, at_once):
        if name in self.world.config.models:
            self.world.call("unload", name, breaks=name, at_once=at_once)

    @rule(kept=st.sets(NAMES), changed=NAMES, argument=st.sampled_from(["", "--other"]))
    def reconfigure(self, kept, changed, argument):
        """Models go, come back and change; a drain that takes too long may cut their requests off."""
        world = self.world
        models = {m.name: m for m in MODELS if m.name in kept}
        if changed in models:
            models[changed] = replace(models[changed], args=(argument,))
        world.may_break |= set(world.alive)
        world.config = replace(world.config, models=models)
        world.call("reconfigure", world.config)

    @invariant()
    def no_ticket_is_in_two_places_or_none(self):
        world = self.world
        held = {t for slot in world.scheduler.slots.values() for t in slot.waiting}
        assert held == world.waiting
        running = {t for slot in world.scheduler.slots.values() for t, run in slot.running.items()}
        assert running == set(world.granted)

    @invariant()
    def states_tell_the_truth(self):
        world = self.world
        for name, slot in world.scheduler.slots.items():
            assert slot.life.is_alive == (name in world.alive)
            assert (slot.life.state is State.STOPPING) == (name in world.halting)

    def teardown(self):
        """Engines that do what they should: whatever waits is served or refused, in a bounded number of steps."""
        world = self.world
        for _ in range(200):
            if not world.waiting:
                break
            for ticket in list(world.granted):
                world.leave(ticket)
            for name in sorted(world.halting):
                world.end(name)
            for name in sorted(set(world.alive) - world.halting - world.is_ready):
                world.ready(name)
            world.wait(40.0)
        assert not world.waiting
        world.may_break |= set(world.alive)
        world.call("close")
        for name in sorted(world.alive):
            world.end(name)
        assert not world.alive


RandomEvents.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRandomEvents = RandomEvents.TestCase
