"""The scheduler's rules, one by one, with engines moved by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_world import World

from proa.core.errors import QueueFullError
from proa.gateway.config import GatewayConfig, Group, ModelConfig
from proa.gateway.errors import (
    EngineCoolingDownError,
    EngineFailedError,
    EngineStartingError,
    GatewayStoppingError,
    NoRoomError,
    UnknownModelError,
)
from proa.gateway.state import State


def model(name, ram=10, **fields):
    return ModelConfig(name=name, memory={"ram": ram}, **fields)


def loaded(world, *names):
    for name in names:
        ticket = world.request(name)
        world.ready(name)
        world.leave(ticket)
    return world


def pair(**fields):
    """Two models of which one fits."""
    return World(model("a", 10), model("b", 10), memory_budget={"ram": 15}, **fields)


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


def test_a_swap_waits_for_running_requests():
    world = loaded(pair(), "a")
    running = world.request("a")
    other = world.request("b")
    world.wait(100)
    assert not world.halting
    world.leave(running)
    assert world.halting == {"a"}
    assert other in world.waiting
    world.end("a")
    world.ready("b")
    assert other in world.granted


def test_two_models_in_turn_are_served_in_batches():
    """Requests for `a` go on for `patience` after `b` was asked for; later ones wait for the next turn."""
    world = loaded(pair(patience=10.0), "a")
    first = world.request("a")
    for_b = world.request("b")
    world.wait(10)
    within = world.request("a")
    world.wait(1)
    after = world.request("a")
    assert {first, within} == set(world.granted) and {for_b, after} == world.waiting
    world.leave(first)
    assert not world.halting
    world.leave(within)
    assert world.halting == {"a"}
    world.end("a")
    world.ready("b")
    assert for_b in world.granted
    world.leave(for_b)
    assert world.halting == {"b"}  # `after` waits
    world.end("b")
    world.ready("a")
    assert after in world.granted
    assert world.num_launches == 3


def test_requests_in_the_queue_of_a_busy_model_are_served_before_it_leaves():
    world = loaded(World(model("a", max_running=1), model("b"), memory_budget={"ram": 15}), "a")
    first, second = world.request("a"), world.request("a")
    world.request("b")
    world.leave(first)
    assert second in world.granted and not world.halting
    world.leave(second)
    assert world.halting == {"a"}


@pytest.mark.parametrize("needs", [90, 50])
def test_constant_load_on_two_models_does_not_starve_a_third(needs):
    """Requests overlap by two, so that neither of the two is ever idle by itself. Both have to go, or one of them."""
    world = World(model("a", 40), model("b", 40), model("c", needs), memory_budget={"ram": 100}, patience=5.0)
    loaded(world, "a", "b")
    running = {name: [world.request(name), world.request(name)] for name in "ab"}
    wanted = world.request("c")
    for _ in range(30):
        for name in "ab":
            world.wait(0.5)
            running[name].append(world.request(name))
            world.leave(running[name].pop(0))
        for name in sorted(world.halting):
            world.end(name)
    assert world.state("c") is State.STARTING
    world.ready("c")
    assert wanted in world.granted


def test_what_was_asked_for_before_is_served_before_it_is_swapped_out():
    world = pair(patience=1.0)
    for_a = world.request("a")
    world.wait(5)
    for_b = world.request("b")
    world.wait(60)
    world.ready("a")
    assert for_a in world.granted and not world.halting
    world.leave(for_a)
    world.end("a")
    world.ready("b")
    assert for_b in world.granted


def test_a_model_asked_for_by_refused_clients_is_left_for_them():
    world = World(model("a", while_starting="refuse"), model("b", while_starting="refuse"), memory_budget={"ram": 15})
    with pytest.raises(EngineStartingError):
        world.request("a")
    with pytest.raises(EngineStartingError):
        world.request("b")
    world.ready("a")
    assert not world.halting
    world.leave(world.request("a"))
    assert world.halting == {"a"}

    world = World(model("a"), model("b"), memory_budget={"ram": 15})
    world.call("load", "a")
    world.ready("a")
    world.leave(world.request("a"))
    world.call("unload", "a")
    world.end("a")
    world.call("load", "a")
    world.ready("a")
    world.request("b")
    world.wait(29.9)
    assert not world.halting
    world.wait(0.1)
    assert world.halting == {"a"}


def test_refusing_models_do_not_hold_requests_for_their_next_turn():
    refusing = model("a", while_starting="refuse")
    world = World(refusing, model("b"), memory_budget={"ram": 15}, patience=10.0)
    world.call("load", "a")
    world.ready("a")
    first = world.request("a")
    world.request("b")
    world.wait(10)
    within = world.request("a")
    assert within in world.granted
    world.wait(1)
    with pytest.raises(EngineStartingError):
        world.request("a")
    world.leave(first)
    world.leave(within)
    assert world.halting == {"a"}

    world = loaded(World(model("a")), "a")
    reconfigured(world, replace(model("a"), while_starting="refuse"))
    world.request("a")
    world.call("unload", "a", breaks="a")
    with pytest.raises(EngineStartingError):
        world.request("a")


def test_a_pinned_engine_does_not_come_back_while_the_gateway_closes():
    world = loaded(World(model("a", pin=True)), "a")
    world.fault("a")
    world.call("close")
    world.end("a")
    assert world.scheduler.next_wakeup is None
    world.wait(1000)
    assert world.num_launches == 1


def test_a_small_model_goes_before_a_blocked_large_one_where_it_delays_nothing():
    world = World(model("a", 50), model("big", 80), model("small", 20), model("medium", 30), memory_budget={"ram": 100})
    loaded(world, "a")
    running = world.request("a")
    world.request("big")
    world.request("medium")
    assert set(world.alive) == {"a"}  # beside `big` there would be no place for it
    world.request("small")
    assert set(world.alive) == {"a", "small"}
    world.leave(running)
    world.end("a")
    assert set(world.alive) == {"small", "big"}


def test_what_never_fits_is_refused():
    world = World(
        model("a", 20), model("p", 10, pin=True), model("r", 20, while_starting="refuse"), memory_budget={"ram": 15}
    )
    ticket = world.request("a")
    assert isinstance(world.refused[ticket], NoRoomError)
    assert "20 bytes of ram" in str(world.refused[ticket])
    with pytest.raises(NoRoomError):
        world.request("r")
    assert world.scheduler.slots["r"].no_room and not world.alive


def test_groups_are_kept():
    world = World(model("a"), model("b"), model("c"), groups={"g": Group(members=("a", "b"))})
    loaded(world, "a", "c")
    world.request("b")
    assert world.halting == {"a"}


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


def test_unloaded_models_make_room_even_if_pinned():
    world = World(model("a", pin=True), model("b"), memory_budget={"ram": 15})
    loaded(world, "a")
    running = world.request("a")
    world.call("unload", "a")
    ticket = world.request("b")
    assert ticket in world.waiting
    world.leave(running)
    world.end("a")
    world.ready("b")
    assert ticket in world.granted


def reconfigured(world, *models, **fields):
    world.config = GatewayConfig(models={m.name: m for m in models}, **fields)
    world.call("reconfigure", world.config)


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
