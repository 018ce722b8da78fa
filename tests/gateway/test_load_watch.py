"""Progress of a start: what counts as such, how far it is, how long it will take."""

from __future__ import annotations

import pytest

from proa.gateway.load_watch import LoadWatch


def watch(**options) -> LoadWatch:
    made = LoadWatch(100.0, 10.0, **options)
    made.enter("loading", 100.0)
    return made


def test_silence_is_a_stall_however_short_the_start():
    silent = watch()
    assert silent.stalled_for(109.9) is None
    assert silent.stalled_for(112.0) == 12.0


@pytest.mark.parametrize(
    "move",
    [
        lambda w, now: w.saw_line(f"layer {now:.0f}", now),
        lambda w, now: w.saw_report(int(now), 1000, now),
        lambda w, now: w.saw_reads({7: int(now) << 20}, now),
        lambda w, now: w.enter("installing", now),
    ],
)
def test_progress_of_any_kind_keeps_a_start_alive(move):
    moving = watch()
    for second in range(105, 1000, 9):
        move(moving, float(second))
        assert moving.stalled_for(second + 9.0) is None
    assert moving.stalled_for(second + 10.0) == 10.0


def test_what_repeats_itself_is_no_progress():
    heartbeat = watch()
    lines = ("INFO 05-12 10:00:{:02d} waiting", "2026-05-12 10:00:{:02d},123 waiting", "[1:00:{:02d}] waiting")
    for line in lines:
        heartbeat.saw_line(line.format(0), 100.0)
    for second in range(1, 15):
        for line in lines:
            heartbeat.saw_line(line.format(second), 100.0 + second)
        heartbeat.saw_report(5, 10, 100.0)
        heartbeat.saw_reads({7: 500 * second}, 100.0 + second)
    assert heartbeat.stalled_for(110.0) == 10.0
    assert heartbeat.progress(110.0).line == "[1:00:14] waiting"


def test_reports_give_fraction_and_time_left():
    loading = watch(usual=60.0)
    assert loading.progress(101.0).eta == 59.0
    assert loading.progress(101.0).fraction is None
    for second in range(1, 21):
        loading.saw_report(50 * second, 2000, 100.0 + second)
    progress = loading.progress(121.0)
    assert progress.fraction == 0.5
    assert progress.eta == pytest.approx(19.0)
    assert str(progress) == "loading 50 % after 21 s, ETA 19 s"
    # Only the last half minute counts.
    for second in range(21, 60):
        loading.saw_report(1000 + 10 * (second - 20), 2000, 100.0 + second)
    assert loading.progress(159.0).eta == pytest.approx((2000 - 1390) / 10.0)


def test_reads_stand_in_for_reports_and_never_claim_to_be_done():
    mib = 1 << 20
    reading = watch()
    reading.bytes_total = 1000 * mib
    reading.saw_reads({1: 100 * mib, 2: 50 * mib}, 101.0)
    assert reading.progress(101.0).bytes_done == 150 * mib
    reading.saw_reads({2: 60 * mib, 3: 40 * mib}, 102.0)  # 1 has ended, 3 is new
    assert reading.progress(102.0).bytes_done == 200 * mib
    reading.saw_reads({3: 5000 * mib}, 103.0)
    assert reading.progress(103.0).fraction == 0.99
    reading.saw_report(300, 2000, 104.0)
    reading.saw_reads({3: 9000 * mib}, 105.0)
    assert reading.progress(105.0).bytes_done == 300 and reading.progress(105.0).bytes_total == 2000


def test_reads_of_unknown_totals_are_progress_without_a_fraction():
    reading = watch()
    reading.saw_reads({1: 1 << 20}, 105.0)
    assert reading.stalled_for(114.0) is None
    assert reading.progress(105.0).fraction is None and reading.progress(105.0).eta is None
    assert str(reading.progress(105.0)) == "loading after 5 s"


def test_other_phases_have_no_time_left():
    installing = watch(usual=60.0)
    installing.enter("installing", 101.0)
    assert installing.progress(102.0).eta is None and str(installing.progress(102.0)) == "installing"
    installing.enter("ready", 103.0)
    assert installing.progress(104.0).fraction == 1.0
