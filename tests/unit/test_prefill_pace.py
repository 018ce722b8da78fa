from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.engine.prefill_pace import PrefillPace, share_tokens


@pytest.mark.parametrize(("decode_s", "gap_s"), [(0.01, 0.2), (0.1, 0.4), (0.3, 0.5)])
def test_the_gap_follows_the_decode_step(decode_s: float, gap_s: float) -> None:
    pace = PrefillPace()
    pace.answered(5.0, decode_s)
    assert pace.gap_s == pytest.approx(gap_s)
    asked = PrefillPace(0.05)
    asked.answered(5.0, decode_s)
    assert asked.gap_s == 0.05


def test_a_layer_is_computed_between_two_decode_steps_however_small_the_gap() -> None:
    pace = PrefillPace(1e-6)
    pace.answered(0.0, 1.0)
    assert not pace.is_due(100.0)
    pace.layer_done(1.0)
    assert pace.is_due(0.0)


def test_it_looks_a_layer_and_a_decode_step_ahead() -> None:
    pace = PrefillPace(0.5)
    pace.answered(0.0, 0.1)
    pace.layer_done(0.15)
    assert not pace.is_due(0.24) and pace.is_due(0.26)


def test_a_pass_is_short_when_passes_like_it_were() -> None:
    pace = PrefillPace(0.5)
    assert not pace.is_short(10)  # nothing is known
    pace.pass_done(100, 0.1)
    assert pace.is_short(10) and pace.is_short(100) and pace.is_short(249) and not pace.is_short(251)
    pace.pass_done(4000, 0.9)
    assert not pace.is_short(3000) and pace.is_short(100)
    pace.pass_done(100, 0.3)  # the machine got slower
    assert not pace.is_short(100)
    pace.pass_done(16, 0.02)
    assert pace.is_short(16) and not pace.is_short(17)


def test_shares() -> None:
    assert share_tokens(100, []) == []
    assert share_tokens(100, [1000]) == [100]
    assert share_tokens(100, [1000, 20]) == [80, 20]
    assert share_tokens(100, [1000, 900, 30, 10]) == [50, 10, 30, 10]
    assert share_tokens(100, [10, 900, 30]) == [10, 60, 30]
    assert share_tokens(1, [5, 3]) == [1, 0]


@given(st.integers(1, 1000), st.lists(st.integers(1, 2000), min_size=1, max_size=12))
def test_shares_take_what_there_is_and_leave_nobody_behind(budget: int, wanted: list[int]) -> None:
    counts = share_tokens(budget, wanted)
    assert all(0 <= count <= want for count, want in zip(counts, wanted, strict=True))
    assert sum(counts) == min(budget, sum(wanted))
    assert counts[0] >= min(wanted[0], budget / 2)
    # Who got less than it lacks lacks at least as much as any younger one that got some.
    others = sorted(zip(wanted[1:], counts[1:], strict=True), key=lambda pair: (pair[0], -pair[1]))
    assert all(have == want for (want, have), (_, later) in zip(others, others[1:], strict=False) if later)


def test_what_is_left_of_a_pass_is_known_from_the_last_one_of_its_size():
    pace = PrefillPace()
    assert pace.whole_s(500, 0.0, 0.0) == 0.0
    assert pace.whole_s(500, 1.0, 0.25) == 4.0
    pace.pass_done(400, 6.0)
    assert pace.whole_s(500, 0.1, 0.25) == 6.0, "its first layers were quick"
    assert pace.whole_s(1000, 1.0, 0.5) == 2.0
    pace.pass_done(20, 1.0)
    overtakes = [
        pace.may_overtake(20, whole_s=6.0, left_s=left, overtaken_s=spent) for left, spent in ((2, 5), (1, 0), (6, 5.5))
    ]
    assert overtakes == [True, False, False]
