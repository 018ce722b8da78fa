"""How models make room for one another, with engines moved by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_world import World, loaded, model, reconfigured

from proa.gateway.config import Group
from proa.gateway.errors import (
    EngineStartingError,
    NoRoomError,
)
from proa.gateway.state import State


def pair(**fields):
    """Two models of which one fits."""
    return World(model("a", 10), model("b", 10), memory_budget={"ram": 15}, **fields)


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
