"""The scheduler's rules, one by one, with engines moved by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_world import World, loaded, model, reconfigured

from proa.core.errors import QueueFullError
from proa.gateway.errors import (
    EngineCoolingDownError,
    EngineFailedError,
    EngineStartingError,
    GatewayStoppingError,
    UnknownModelError,
)
from proa.gateway.state import State


def test_many_first_requests_start_one_engine():
    world = World(model("a"))
    tickets = [world.request("a") for _ in range(50)]
    assert world.num_launches == 1 and not world.granted
    world.ready("a")
    assert set(world.granted) == set(tickets)


def test_requests_beyond_max_running_wait_in_order():
    world = loaded(World(model("a", max_running=2)), "a")
    first, second, third, fourth = [world.request("a") for _ in range(4)]
    assert set(world.granted) == {first, second}
    world.leave(second)
    assert set(world.granted) == {first, third}
    world.leave(third)
    world.leave(fourth)
    assert set(world.granted) == {first}


def test_the_queue_is_bounded():
    world = World(model("a", max_running=1, max_waiting=2))
    world.request("a")
    world.request("a")
    with pytest.raises(QueueFullError) as failure:
        world.request("a")
    assert failure.value.retry_after_s >= 1
    world.ready("a")
    assert len(world.waiting) == 1
    world.request("a")
    with pytest.raises(QueueFullError):
        world.request("a")


def test_a_queue_of_none_still_takes_what_can_run_at_once():
    world = World(model("a", max_running=1, max_waiting=0))
    with pytest.raises(QueueFullError):
        world.request("a")
    world.call("load", "a")
    world.ready("a")
    world.request("a")
    with pytest.raises(QueueFullError):
        world.request("a")


def test_refusing_models_load_all_the_same():
    world = World(model("a", while_starting="refuse", cancel_load_after=0))
    for _ in range(3):
        with pytest.raises(EngineStartingError) as failure:
            world.request("a")
        assert failure.value.retry_after_s >= 1
    assert world.num_launches == 1 and not world.halting
    world.ready("a")
    assert world.request("a") in world.granted


def test_a_failed_start_refuses_who_waits_and_cools_down_longer_each_time():
    world = World(model("a"))
    for pause in (10, 20, 40):
        ticket = world.request("a")
        world.end("a")
        assert isinstance(world.refused[ticket], EngineFailedError)
        assert world.refused[ticket].retry_after_s == pause
        assert "exit status 1" in str(world.refused[ticket])
        with pytest.raises(EngineCoolingDownError) as failure:
            world.request("a")
        assert failure.value.retry_after_s == pause
        world.wait(pause - 0.5)
        with pytest.raises(EngineCoolingDownError):
            world.request("a")
        world.wait(0.5)
    assert world.num_launches == 3


def test_a_crash_while_serving_cools_down_too():
    world = loaded(World(model("a", max_running=1)), "a")
    world.request("a")
    second = world.request("a")
    world.end("a")
    assert isinstance(world.refused[second], EngineFailedError)
    assert world.state("a") is State.FAILED
    with pytest.raises(EngineCoolingDownError):
        world.request("a")


def test_a_request_that_outlives_its_engine_takes_no_place_at_the_next():
    world = loaded(World(model("a", max_running=1)), "a")
    old = world.request("a")
    place = world.granted.pop(old)
    world.end("a")
    world.wait(10)
    new = world.request("a")
    world.ready("a")
    assert world.granted == {new: ("a", place[1] + 1)}
    world.scheduler.leave(old, world.now)
    assert world.scheduler.slots["a"].num_running == 1


def test_an_operator_s_load_ends_the_pause():
    world = World(model("a"))
    world.request("a")
    world.end("a")
    world.call("load", "a")
    assert world.state("a") is State.STARTING
    world.end("a")
    assert world.scheduler.slots["a"].life.retry_at == world.now + 10


def test_a_stalled_engine_has_failed_once_it_is_gone():
    world = World(model("a"))
    ticket = world.request("a")
    world.fault("a")
    assert world.state("a") is State.STOPPING and ticket in world.waiting
    world.end("a", "killed")
    assert "stalled" in str(world.refused[ticket])
    assert world.state("a") is State.FAILED


def test_a_pinned_engine_that_fails_comes_back_by_itself():
    world = World(model("a", pin=True))
    world.call("load", "a")
    world.ready("a")
    world.end("a")
    world.wait(9)
    assert world.num_launches == 1
    world.wait(1)
    assert world.num_launches == 2


def test_a_load_is_given_up_when_nobody_waits_for_it():
    world = World(model("a", cancel_load_after=5))
    first, second = world.request("a"), world.request("a")
    world.leave(first)
    world.wait(60)
    world.leave(second)
    world.wait(4)
    again = world.request("a")  # a client that timed out and asks again keeps the load alive
    world.leave(again)
    world.wait(4.9)
    assert not world.halting
    world.wait(0.1)
    assert world.halting == {"a"}
    world.end("a")
    assert world.state("a") is State.STOPPED


def test_loads_may_be_finished_whoever_waits():
    world = World(model("a", cancel_load_after=None), model("b", cancel_load_after=0))
    world.leave(world.request("a"))
    world.call("load", "b")
    world.wait(10_000)
    assert not world.halting


def test_an_idle_engine_is_unloaded_after_its_time():
    world = loaded(World(model("a", ttl=60)), "a")
    world.wait(59)
    ticket = world.request("a")
    world.wait(600)
    world.leave(ticket)
    world.wait(59)
    assert not world.halting
    world.wait(1)
    assert world.halting == {"a"}


def test_pinned_and_timeless_engines_stay():
    world = loaded(World(model("a", ttl=60, pin=True), model("b")), "a", "b")
    world.wait(1e6)
    assert not world.halting


def test_a_request_while_its_engine_is_stopped_starts_the_next():
    world = loaded(World(model("a", ttl=60)), "a")
    world.wait(60)
    ticket = world.request("a")
    assert ticket in world.waiting
    world.end("a")
    world.ready("a")
    assert ticket in world.granted


def test_a_pinned_engine_does_not_come_back_while_the_gateway_closes():
    world = loaded(World(model("a", pin=True)), "a")
    world.fault("a")
    world.call("close")
    world.end("a")
    assert world.scheduler.next_wakeup is None
    world.wait(1000)
    assert world.num_launches == 1


def test_unload_waits_for_running_requests():
    world = loaded(World(model("a", drain_timeout=60)), "a")
    running = world.request("a")
    world.call("unload", "a", breaks="a")
    later = world.request("a")
    world.wait(59)
    assert not world.halting and later in world.waiting
    world.leave(running)
    assert world.halting == {"a"}
    world.end("a")
    world.ready("a")
    assert later in world.granted


def test_unload_waits_no_longer_than_it_may():
    world = loaded(World(model("a", drain_timeout=60)), "a")
    world.request("a")
    world.call("unload", "a", breaks="a")
    world.wait(60)
    assert world.halting == {"a"}
    world.end("a")
    assert world.state("a") is State.STOPPED

    loaded(world, "a")
    world.request("a")
    world.call("unload", "a", breaks="a")
    world.scheduler.unload("a", world.now, at_once=True)
    world.settle()
    assert world.halting == {"a"}


def test_unload_of_a_load_refuses_who_waits():
    world = World(model("a"))
    ticket = world.request("a")
    world.call("unload", "a")
    assert isinstance(world.refused[ticket], EngineFailedError) and world.halting == {"a"}
    world.end("a")
    world.call("unload", "a")
    assert world.state("a") is State.STOPPED


def test_a_new_configuration_loses_no_running_request():
    world = loaded(World(model("a"), model("b"), model("c")), "a", "b", "c")
    a, b, c = (world.request(name) for name in "abc")
    reconfigured(world, model("d"), replace(model("c"), ttl=5, max_running=1), replace(model("a"), args=("--new",)))
    assert set(world.granted) == {a, b, c} and not world.halting
    assert list(world.scheduler.slots) == ["d", "c", "a", "b"]
    more_c = world.request("c")
    assert more_c in world.waiting  # taken over at once
    new_a = world.request("a")
    world.leave(a)
    assert world.halting == {"a"}
    world.end("a")
    assert world.scheduler.slots["a"].config.args == ("--new",)
    world.ready("a")
    assert new_a in world.granted
    world.leave(b)
    world.end("b")
    assert "b" not in world.scheduler.slots


def test_a_configuration_that_comes_back_is_taken_back():
    world = loaded(World(model("a")), "a")
    running = world.request("a")
    reconfigured(world)
    reconfigured(world, model("a", ttl=1))
    world.leave(running)
    world.end("a")
    assert world.scheduler.slots["a"].config.ttl == 1
    reconfigured(world, model("a", ttl=2))
    assert world.scheduler.slots["a"].config.ttl == 2


def test_loads_of_an_old_configuration_start_over():
    world = World(model("a"), model("b"))
    a, b = world.request("a"), world.request("b")
    reconfigured(world, replace(model("a"), args=("--new",)))
    assert world.halting == {"a", "b"}
    assert isinstance(world.refused[b], UnknownModelError)
    reconfigured(world, replace(model("a"), args=("--newer",)))
    world.end("a")
    world.end("b")
    assert world.scheduler.slots["a"].config.args == ("--newer",)
    world.ready("a")
    assert a in world.granted


def test_what_is_not_running_is_replaced_at_once():
    world = World(model("a"), model("b"))
    world.request("a")
    world.end("a")
    reconfigured(world, model("a", ttl=3))
    with pytest.raises(EngineCoolingDownError):
        world.request("a")
    reconfigured(world, replace(model("a"), args=("--mended",)))
    assert world.request("a") in world.waiting and world.num_launches == 2
    assert list(world.scheduler.slots) == ["a"]


def test_a_removed_model_that_fails_is_gone():
    world = loaded(World(model("a", pin=True)), "a")
    world.request("a")
    reconfigured(world)
    world.end("a")
    assert not world.scheduler.slots


def test_closing_refuses_and_ends_everything():
    world = loaded(World(model("a"), model("b"), model("c"), memory_budget={"ram": 25}), "a", "b")
    world.request("a")
    world.request("b")
    ticket = world.request("c")
    world.may_break |= {"a", "b"}
    world.call("close")
    assert world.halting == {"a", "b"}
    assert isinstance(world.refused[ticket], GatewayStoppingError)
    with pytest.raises(GatewayStoppingError):
        world.request("a")
    world.end("a")
    world.end("b")
    assert not world.alive


def test_late_and_unknown_news_change_nothing():
    world = loaded(World(model("a")), "a")
    run = world.alive["a"]
    world.call("ready", "a", run)
    world.scheduler.fault("a", run - 1, world.now, "old")
    world.scheduler.ended("a", run - 1, world.now, "old")
    world.scheduler.leave("nobody", world.now)
    world.settle()
    assert world.state("a") is State.READY
