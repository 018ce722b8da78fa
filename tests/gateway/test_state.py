"""The lifecycle of an engine: every event in every state."""

from __future__ import annotations

import itertools

import pytest

from proa.gateway.state import Ended, Forgive, Lifecycle, Ready, Start, State, Stop, backoff, step

STARTING = Lifecycle(State.STARTING, run=3, since=1, failures=2)
READY = Lifecycle(State.READY, run=3, since=1, failures=2)
STOPPING = Lifecycle(State.STOPPING, run=3, since=1, failures=2, reason="why")
AT_FAULT = Lifecycle(State.STOPPING, run=3, since=1, failures=2, reason="stalled", at_fault=True)
STOPPED = Lifecycle(State.STOPPED, run=3, since=1, failures=2)
FAILED = Lifecycle(State.FAILED, run=3, since=1, failures=2, retry_at=20, reason="crash")
ALL = (STARTING, READY, STOPPING, AT_FAULT, STOPPED, FAILED)

TABLE = [
    (STOPPED, Start(5), Lifecycle(State.STARTING, 4, 5, 2)),
    (FAILED, Start(20), Lifecycle(State.STARTING, 4, 20, 2)),
    (STARTING, Ready(3, 5), Lifecycle(State.READY, 3, 5, 2)),
    (STARTING, Stop(3, 5, "why"), Lifecycle(State.STOPPING, 3, 5, 2, reason="why")),
    (STARTING, Stop(3, 5, "why", at_fault=True), Lifecycle(State.STOPPING, 3, 5, 2, reason="why", at_fault=True)),
    (READY, Stop(3, 5, "why"), Lifecycle(State.STOPPING, 3, 5, 0, reason="why")),
    (READY, Stop(3, 5, "why", at_fault=True), Lifecycle(State.STOPPING, 3, 5, 2, reason="why", at_fault=True)),
    (STARTING, Ended(3, 5, "crash"), Lifecycle(State.FAILED, 3, 5, 3, 45, "crash")),
    (READY, Ended(3, 5, "crash"), Lifecycle(State.FAILED, 3, 5, 3, 45, "crash")),
    (READY, Ended(3, 302, "crash"), Lifecycle(State.FAILED, 3, 302, 1, 312, "crash")),
    (STOPPING, Ended(3, 5, "exit 0"), Lifecycle(State.STOPPED, 3, 5, 2, reason="why")),
    (AT_FAULT, Ended(3, 5, "killed"), Lifecycle(State.FAILED, 3, 5, 3, 45, "stalled")),
    (FAILED, Forgive(5), Lifecycle(State.STOPPED, 3, 5)),
]


@pytest.mark.parametrize(("life", "event", "after"), TABLE)
def test_transitions(life, event, after):
    assert step(life, event) == after


def test_every_other_event_changes_nothing():
    events = (Start(19), Ready(3, 5), Stop(3, 5, "why"), Ended(3, 5, "x"), Forgive(5))
    moves = {(life, type(event)) for life, event, _ in TABLE}
    still = [(life, event) for life, event in itertools.product(ALL, events) if (life, type(event)) not in moves]
    assert len(still) == 6 * 5 - 10
    for life, event in still:
        assert step(life, event) is life
    assert step(FAILED, Start(19)) is FAILED


@pytest.mark.parametrize("life", ALL)
@pytest.mark.parametrize("event", [Ready(2, 5), Stop(2, 5, "why"), Ended(2, 5, "x")])
def test_events_of_an_earlier_run_change_nothing(life, event):
    assert step(life, event) is life


def test_pauses_double_from_ten_seconds_to_five_minutes():
    assert [backoff(n) for n in (1, 2, 3, 4, 5, 6, 7, 50, 10_000)] == [10, 20, 40, 80, 160, 300, 300, 300, 300]
