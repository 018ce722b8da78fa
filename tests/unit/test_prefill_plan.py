"""The split of a chunk's experts against all splits there are."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.moe.prefill_plan import ExpertSize, PrefillRates, plan_layer

SIZE = ExpertSize(7168, 2048, 24_772_608)
# An expert takes 0.2 ms for its weights and 10 us a token on the CPU; a tenth more beside copies.
RATES = PrefillRates(
    stream_bytes=55e9,
    stream_beside_bytes=50e9,
    row_bytes=45e9,
    gpu_flops=400e12,
    cpu_tokens=(1.0, 16.0, 256.0),
    cpu_s=(0.00021, 0.00036, 0.00276),
    cpu_beside_s=(0.000231, 0.000396, 0.003036),
)


def plan(load, on_gpu, tokens, **options):
    return plan_layer(
        np.asarray(load, np.float64), np.asarray(on_gpu, np.bool_), tokens=tokens, size=SIZE, rates=RATES, **options
    )


def cpu_seconds(load, times):
    if load == 0:
        return 0.0
    needed = 1 - math.exp(-load)
    return needed * seconds_of(load / needed, times)


def seconds_of(tokens, times):
    if tokens <= 1:
        return times[0]
    for (m0, t0), (m1, t1) in pairwise(zip(RATES.cpu_tokens, times, strict=True)):
        if tokens <= m1 or m1 == 256.0:
            return t0 + (tokens - m0) * (t1 - t0) / (m1 - m0)
    raise AssertionError


def seconds(load, on_gpu, cpu, tokens, trunk_s=0.0):
    """Of a split, event by event."""
    work = sum(cpu_seconds(load[e], RATES.cpu_beside_s) for e in cpu)
    rows = tokens * (1 - math.exp(-sum(load[e] for e in cpu) / tokens)) * SIZE.row_bytes
    left = sum(1 for e in range(len(load)) if not on_gpu[e] and e not in cpu) * SIZE.nbytes + rows
    if left / 50e9 > work:
        busy, crossing = work, work + (left - work * 50e9) / 55e9
    else:
        crossing = left / 50e9
        alone = sum(cpu_seconds(load[e], RATES.cpu_s) for e in cpu)
        busy = crossing + alone * (1 - crossing / work) if work else 0.0
    gpu = sum(n for e, n in enumerate(load) if e not in cpu) * SIZE.flops / 400e12
    return max(crossing, trunk_s + gpu, trunk_s + 2 * rows / 45e9 + busy)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=7), st.floats(0.0, 0.01))
def test_no_other_split_takes_less_time(experts, trunk_s):
    load, on_gpu = [float(n) for n, _ in experts], [flag for _, flag in experts]
    tokens = max(1, int(sum(load) / 2))
    chosen = plan(load, on_gpu, tokens, trunk_s=trunk_s)
    away = [e for e, flag in enumerate(on_gpu) if not flag]
    assert sorted(chosen.streamed + chosen.cpu) == away
    assert chosen.seconds == pytest.approx(seconds(load, on_gpu, chosen.cpu, tokens, trunk_s))
    needed = [e for e in away if load[e]]
    unused = [e for e in away if not load[e]]
    assert not set(unused) & set(chosen.streamed)

    def of(cpu):
        return seconds(load, on_gpu, [*unused, *cpu], tokens, trunk_s)

    # The experts with the fewest tokens go to the CPU first; that is not always best, but no more than a tie is lost.
    ordered = sorted(needed, key=lambda e: load[e])
    best = min(of(ordered[:count]) for count in range(len(ordered) + 1))
    assert best / 0.97 + 1e-12 >= chosen.seconds
    assert chosen.seconds <= min(of([]), of(needed)) + 1e-12, "never slower than the better of the two alone"
    few = min(of(cpu) for size in range(len(needed) + 1) for cpu in combinations(needed, size))
    assert chosen.seconds <= 1.25 * few + 1e-12


def test_a_threshold_decides_for_all():
    load, on_gpu = np.full(8, 100.0), np.arange(8) < 2
    assert plan(load, on_gpu, 100, stream_all=True).streamed == (2, 3, 4, 5, 6, 7)
    assert plan(load, on_gpu, 100, stream_all=False).cpu == (2, 3, 4, 5, 6, 7)


def test_experts_nobody_needs_do_not_cross():
    chosen = plan([0.0, 5000.0, 0.0], [False] * 3, 5000)
    assert chosen.streamed == (1,) and chosen.cpu == (0, 2)


def even(tokens, **options):
    return plan(np.full(384, tokens * 8 / 384), np.zeros(384, np.bool_), tokens, **options)


def test_a_few_tokens_stay_on_the_cpu_and_a_long_chunk_crosses():
    assert len(even(64).cpu) > 200
    assert len(even(1024).streamed) > 100 and len(even(1024).cpu) > 100
    assert len(even(32768).streamed) == 384, "the CPU's few experts are not worth the rows they want"


def test_the_more_the_trunk_takes_the_less_the_cpu_gets():
    counts = [len(even(8192, trunk_s=trunk_s).cpu) for trunk_s in (0.0, 0.02, 0.05, 0.2)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 20 and counts[-1] == 0


def test_a_cpu_that_is_slower_than_it_was_gets_less():
    assert len(even(2048).cpu) > len(even(2048, cpu_scale=2.0).cpu) > 0


def test_rare_experts_go_to_the_cpu():
    load = np.concatenate([np.full(284, 8192 * 8 * 0.98 / 284), np.full(100, 8192 * 8 * 0.02 / 100)])
    chosen = plan(load, np.zeros(384, np.bool_), 8192)
    assert set(range(284, 384)) <= set(chosen.cpu)
    assert chosen.seconds < 0.8 * plan(load, np.zeros(384, np.bool_), 8192, stream_all=True).seconds


def test_what_was_measured_at_one_size_is_all_that_is_known():
    rates = PrefillRates(1.0, 1.0, 1.0, 1.0, (8.0,), (2.0,), (3.0,))
    assert rates.cpu_seconds(np.array([0.0, 1.0, 8.0, 16.0]), beside=False).tolist() == [0.0, 2.0, 2.0, 4.0]
