"""Who leaves so that another fits."""

from __future__ import annotations

import itertools

import pytest

from proa.gateway.config import Group
from proa.gateway.policy import Limits, Resident, Room, fits, make_room

LIMITS = Limits({"ram": 100, "gpu": 10})


def resident(name, ram=0, gpu=0, **fields):
    return Resident(name, {"ram": ram, "gpu": gpu}, **fields)


TARGET = resident("t", 60, 2)


def test_what_fits_sends_nobody_away():
    assert make_room(TARGET, [], LIMITS) == Room("free")
    assert make_room(TARGET, [resident("a", 40, 8)], LIMITS) == Room("free")


def test_a_resource_without_a_budget_is_unlimited():
    assert make_room(Resident("t", {"nvme": 1 << 60}), [Resident("a", {"nvme": 1 << 60})], LIMITS) == Room("free")


def test_the_longest_unused_leaves():
    residents = [resident("new", 41, last_used=2), resident("old", 41, last_used=1)]
    assert make_room(resident("t", 50), residents, LIMITS) == Room("evict", idle=("old",))


def test_every_resource_counts_and_nobody_leaves_in_vain():
    # `a` is the oldest, but its memory is not what is lacking once `b` has left.
    residents = [resident("a", 5, 1, last_used=1), resident("b", 10, 8, last_used=2), resident("c", 10, 1, last_used=3)]
    assert make_room(resident("t", 60, 4), residents, LIMITS) == Room("evict", idle=("b",))


def test_idle_before_busy_and_leaving_before_both():
    busy = resident("busy", 50, is_busy=True, last_used=0)
    idle = resident("idle", 50, last_used=9)
    assert make_room(resident("t", 50), [busy, idle], LIMITS) == Room("evict", idle=("idle",))
    leaving = resident("leaving", 50, is_leaving=True, is_busy=True, last_used=99)
    assert make_room(resident("t", 50), [idle, leaving], LIMITS) == Room("wait", leaving=("leaving",))
    room = make_room(resident("t", 100), [busy, leaving], LIMITS)
    assert room == Room("wait", busy=("busy",), leaving=("leaving",))
    assert room.going == ("busy", "leaving")
    assert make_room(resident("t", 100), [idle, busy], LIMITS) == Room("wait", idle=("idle",), busy=("busy",))
    assert make_room(resident("t", 100), [idle, leaving], LIMITS) == Room("evict", ("idle",), leaving=("leaving",))


def test_a_model_that_states_no_needs_runs_alone():
    unknown = Resident("u", None)
    assert make_room(unknown, [resident("a", 1)], LIMITS) == Room("evict", idle=("a",))
    assert make_room(resident("a", 1), [unknown], LIMITS) == Room("evict", idle=("u",))
    assert make_room(unknown, [], LIMITS) == Room("free")


def test_groups_limit_only_their_members():
    limits = Limits({}, (Group(members=("a", "b", "c"), max_loaded=2),))
    a, b, x = resident("a", last_used=1), resident("b", last_used=2), resident("x", last_used=0)
    assert make_room(resident("c"), [a, b, x], limits) == Room("evict", idle=("a",))
    assert make_room(resident("c"), [b, x], limits) == Room("free")
    assert make_room(resident("y"), [a, b, x], limits) == Room("free")


def test_what_is_pinned_stays():
    pinned = resident("p", 50, is_pinned=True)
    room = make_room(TARGET, [pinned, resident("a", 10)], LIMITS)
    assert room == Room("never", reason="what is pinned leaves no room: p")
    assert make_room(Resident("u", None), [pinned], LIMITS).kind == "never"


def test_what_is_larger_than_the_budget_never_fits():
    room = make_room(resident("t", 101), [resident("a", 1)], LIMITS)
    assert room == Room("never", reason="it needs 101 bytes of ram (budget 100)")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_against_every_choice_there_is(size):
    """The answer fits, no part of it is superfluous, and it is `never` only if nothing fits."""
    kinds = [{}, {"is_busy": True}, {"is_leaving": True}, {"is_pinned": True}]
    for needs in itertools.combinations_with_replacement((10, 30, 50), size):
        for flags in itertools.product(kinds, repeat=size):
            residents = [
                resident(str(i), n, last_used=i, **f) for i, (n, f) in enumerate(zip(needs, flags, strict=True))
            ]
            room = make_room(TARGET, residents, LIMITS)
            movable = {r.name for r in residents if not r.is_pinned}
            if room.kind == "never":
                assert not fits(TARGET, [r for r in residents if r.is_pinned], LIMITS)
                continue
            going = set(room.going)
            assert going <= movable
            assert fits(TARGET, [r for r in residents if r.name not in going], LIMITS)
            for name in going:
                assert not fits(TARGET, [r for r in residents if r.name not in going - {name}], LIMITS)
            assert (room.kind == "free") == (not going)
            assert room.kind != "evict" or (room.idle and not room.busy)
