"""The sampler against a slow reference: full sort, float64, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.core.sampling_params import SamplingParams
from proa.engine import sampler
from proa.engine.logit_adjust import LogitAdjuster
from proa.engine.random_numbers import _mix, uniform
from proa.engine.sampler import LogitsError, draw, largest


def draw_token(logits: np.ndarray, *, seed: int = 0, position: int = 0, index: int = 0, **sampling: Any) -> int:
    params = SamplingParams(**sampling)
    adjuster = LogitAdjuster(params, prompt=[], end_ids=[], vocab_size=logits.size)
    return draw(logits, params, adjuster, seed=seed, position=position, index=index).token


def reference_distribution(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """(order, probabilities in that order) of what is left, in float64. top_p over 1 keeps everything."""
    x = logits.astype(np.float64)
    order = np.lexsort((np.arange(x.size), -x))
    with np.errstate(under="ignore"):
        p = np.exp((x[order] - x.max()) / temperature)
    keep = p >= min_p
    if top_k > 0:
        keep[top_k:] = False
    order, p = order[keep], p[keep] / p[keep].sum()
    count = 1
    while count < p.size and p[:count].sum() < top_p:
        count += 1
    return order[:count], p[:count] / p[:count].sum()


def frequencies(logits: np.ndarray, draws: int, **sampling: Any) -> np.ndarray:
    counts = np.zeros(logits.size)
    for position in range(draws):
        counts[draw_token(logits, seed=11, position=position, **sampling)] += 1
    return counts / draws


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 700),
    spread=st.floats(0.01, 12),
    temperature=st.floats(0.05, 5),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    top_k=st.one_of(st.just(-1), st.integers(2, 800)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    ties=st.booleans(),
    small=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_candidates_equal_the_reference(
    seed: int,
    size: int,
    spread: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    ties: bool,
    small: bool,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits)
    logits[rng.random(size) < 0.1] = -np.inf
    logits[rng.integers(size)] = logits.max() if np.isfinite(logits.max()) else 0.0
    original = logits.copy()
    settings_ = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    first, sampler._FIRST_CANDIDATES = sampler._FIRST_CANDIDATES, 16 if small else 2048
    try:
        tokens = {draw_token(logits, seed=seed, position=i, **settings_) for i in range(20)}
        kept, weights = sampler._candidates(logits, logits.max(), SamplingParams(**settings_))
    finally:
        sampler._FIRST_CANDIDATES = first
    # Weights differ from the reference by a few ulp of exp and of its argument, sums by as much; an exact cut-off can
    # fall on either side within that.
    largest_argument = float(np.abs(logits[np.isfinite(logits)]).max()) * 2 / temperature
    slack = 4 * 2.0**-23 * (4 + largest_argument)
    widest, _ = reference_distribution(logits, temperature, top_p + slack, top_k, min_p * (1 - slack))
    least, _ = reference_distribution(logits, temperature, top_p - slack, top_k, min(1.0, min_p * (1 + slack)))
    assert tokens <= set(widest.tolist())
    # A weight of 0 in float32 is never drawn, so it makes no difference whether it is in.
    assert np.count_nonzero(weights) <= widest.size
    assert least.size <= kept.size
    assert (kept == -np.sort(-logits)[: kept.size]).all()
    assert (logits == original).all()


@pytest.mark.parametrize("size", [7, 300, 5000])
@pytest.mark.parametrize("first_candidates", [4, 2048])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_p": 0.9, "top_k": 6, "min_p": 0.01},
    ],
)
def test_frequencies_equal_the_reference(
    size: int, first_candidates: int, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_FIRST_CANDIDATES", first_candidates)
    logits = np.random.default_rng(size).normal(size=size).astype(np.float32) * 2
    draws = 1500
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **sampling}
    order, p = reference_distribution(logits, **{**values, "top_p": sampling.get("top_p", 2.0)})
    expected = np.zeros(size)
    expected[order] = p
    seen = frequencies(logits, draws, **values)
    assert (seen[expected == 0] == 0).all()
    # Kolmogorov: sup |F_n - F| > c / sqrt(n) has probability 2 exp(-2 c^2); c = 2.6 is one in 370 000.
    assert np.abs(np.cumsum(seen) - np.cumsum(expected)).max() < 2.6 / math.sqrt(draws)


def test_greedy_takes_the_lowest_id_of_equals_and_ignores_the_rest() -> None:
    logits = np.array([0, 3, 3, 1], dtype=np.float32)
    assert draw_token(logits, temperature=0.0, top_p=0.1, min_p=1.0, top_k=3) == 1
    assert draw_token(logits, temperature=1e-6) == 1
    assert draw_token(logits, temperature=5.0, top_k=1) == 1
    assert draw_token(logits, temperature=5.0, top_p=1e-9) == 1
    assert {draw_token(logits, min_p=1.0, position=i) for i in range(50)} == {1, 2}


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    logits[4000] = 1.0
    assert {draw_token(logits, top_k=3, position=i) for i in range(200)} == {4000, 0, 1}


def test_degenerate_rows() -> None:
    lonely = np.full(3000, -np.inf, dtype=np.float32)
    lonely[2999] = -1e30
    for sampling in ({}, {"top_p": 0.5}, {"top_k": 50}, {"min_p": 0.5}, {"temperature": 0.0}, {"temperature": 1e-5}):
        assert draw_token(lonely, logprobs=5, **sampling) == 2999
    extreme = np.array([3e38, -3e38, 3e38], dtype=np.float32)
    assert {draw_token(extreme, position=i) for i in range(50)} == {0, 2}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinite_rows_are_errors(value: float, temperature: float) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[50] = value
    with pytest.raises(LogitsError):
        draw_token(logits, temperature=temperature)
    with pytest.raises(LogitsError):
        draw_token(np.full(100, -np.inf, dtype=np.float32), temperature=temperature)


def test_largest_is_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 5, 2000):
        values = np.round(rng.normal(size=size) * 3).astype(np.float32)
        expected = np.lexsort((np.arange(size), -values))
        for count in (0, 1, 3, size, size + 5):
            assert largest(values, count).tolist() == expected[:count].tolist()


def test_logprobs_equal_log_softmax_of_raw_logits() -> None:
    logits = np.random.default_rng(1).normal(size=4000).astype(np.float32) * 5
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    params = SamplingParams(temperature=0.3, top_k=4, logprobs=7, logit_bias={9: 50.0})
    adjuster = LogitAdjuster(params, prompt=[], end_ids=[], vocab_size=4000)
    entry = draw(logits, params, adjuster, seed=1, position=2, index=0).logprob
    assert entry is not None
    assert entry.token_id == 9
    expected = np.argsort(-exact)[:7]
    assert [token for token, _ in entry.top] == expected.tolist()
    # exp in float32 is off by a few ulp, relative; so is the sum, and its logarithm by as much absolutely.
    tolerance = 8 * 2.0**-24 * (1 + float(np.abs(logits).max()))
    assert entry.logprob == pytest.approx(exact[9], abs=tolerance)
    assert [value for _, value in entry.top] == pytest.approx(exact[expected].tolist(), abs=tolerance)


def test_adjuster_follows_the_formula() -> None:
    rng = np.random.default_rng(2)
    prompt, generated = rng.integers(0, 300, 90).tolist(), rng.integers(0, 300, 200).tolist()
    params = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=-0.7,
        logit_bias={3: 5.0, 299: -100.0},
        min_tokens=201,
        stop_token_ids=(7,),
    )
    adjuster = LogitAdjuster(params, prompt=prompt, end_ids=[7, 8, 9999], vocab_size=300)
    for token in generated:
        adjuster.observe(token)
    logits = rng.normal(size=300).astype(np.float32) * 4
    expected = logits.astype(np.float64)
    for token in range(300):
        expected[token] += params.logit_bias.get(token, 0.0)
        if token in (7, 8):
            expected[token] = -np.inf
        if token in prompt or token in generated:
            expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
        expected[token] -= 0.4 * generated.count(token) - 0.7 * (token in generated)
    assert adjuster.changes(200)
    adjuster.apply(logits, 200)
    np.testing.assert_allclose(logits, expected, rtol=8 * 2.0**-23, atol=8 * 2.0**-23 * 8)


def test_adjuster_does_nothing_by_default() -> None:
    adjuster = LogitAdjuster(SamplingParams(), prompt=[1], end_ids=[2], vocab_size=10)
    assert not adjuster.changes(0)
    masked = LogitAdjuster(SamplingParams(min_tokens=2), prompt=[1], end_ids=[2], vocab_size=10)
    assert masked.changes(1) and not masked.changes(2)


def test_uniform_numbers_are_uniform_and_keyed() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(40) for position in range(250)])
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    ordered = np.sort(numbers)
    assert np.abs(ordered - np.arange(10_000) / 10_000).max() < 2.6 / 100
    assert len(set(numbers.tolist())) == 10_000
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / 100
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert uniform(5, 6) == uniform(5, 6) != uniform(6, 5)
    # The published generator's first number after seed 0.
    assert _mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
