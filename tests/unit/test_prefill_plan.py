"""The split of a chunk's experts against all splits there are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.moe.prefill_plan import PrefillRates, plan_layer

HIDDEN, INTERMEDIATE, EXPERT_BYTES = 7168, 2048, 24_772_608
FLOPS = 6.0 * HIDDEN * INTERMEDIATE
RATES = PrefillRates(55e9, 50e9, 100e9, 8e12, 400e12)


def plan(load, on_gpu, tokens, rates=RATES, **options):
    return plan_layer(
        np.asarray(load, np.float64), np.asarray(on_gpu, np.bool_), tokens=tokens, hidden=HIDDEN,
        intermediate=INTERMEDIATE, expert_bytes=EXPERT_BYTES, rates=rates, **options,
    )  # fmt: skip


def seconds(load, on_gpu, cpu, tokens):
    """Of a split, from the definition."""
    busy = sum(max(EXPERT_BYTES / RATES.cpu_bytes, load[e] * FLOPS / RATES.cpu_flops) for e in cpu if load[e] > 0)
    crossing = sum(1 for e in range(len(load)) if not on_gpu[e] and e not in cpu) * EXPERT_BYTES
    if busy > 0:
        busy += tokens * HIDDEN * 8 / RATES.token_bytes + tokens * HIDDEN * 8 / RATES.cpu_bytes
        crossing += tokens * HIDDEN * 4
    gpu = sum(n for e, n in enumerate(load) if e not in cpu) * FLOPS / RATES.gpu_flops
    return max(busy, crossing / RATES.stream_bytes, gpu)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=7))
def test_no_other_split_takes_less_time(experts):
    load, on_gpu = [float(n) for n, _ in experts], [flag for _, flag in experts]
    tokens = max(1, int(sum(load) / 2))
    chosen = plan(load, on_gpu, tokens)
    away = [e for e, flag in enumerate(on_gpu) if not flag]
    assert sorted(chosen.streamed + chosen.cpu) == away
    assert chosen.seconds == pytest.approx(seconds(load, on_gpu, chosen.cpu, tokens))
    best = min(seconds(load, on_gpu, cpu, tokens) for size in range(len(away) + 1) for cpu in combinations(away, size))
    assert chosen.seconds <= best * (1 + 1e-9)


def test_a_threshold_decides_for_all():
    load, on_gpu = np.full(8, 100.0), np.arange(8) < 2
    assert plan(load, on_gpu, 100, stream_all=True).streamed == (2, 3, 4, 5, 6, 7)
    assert plan(load, on_gpu, 100, stream_all=False).cpu == (2, 3, 4, 5, 6, 7)


def test_experts_nobody_needs_do_not_cross():
    chosen = plan([0.0, 5000.0, 0.0], [False] * 3, 5000)
    assert chosen.streamed == (1,) and chosen.cpu == (0, 2)


def test_a_few_tokens_stay_on_the_cpu_and_a_long_chunk_crosses():
    few = plan(np.full(384, 8 / 384), np.zeros(384, np.bool_), 1)
    many = plan(np.full(384, 16384 * 8 / 384), np.zeros(384, np.bool_), 16384)
    assert len(few.cpu) > len(few.streamed)
    assert len(many.streamed) > 340
