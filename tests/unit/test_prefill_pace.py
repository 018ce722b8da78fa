from __future__ import annotations

from collections.abc import Callable

import pytest

from proa.engine.prefill_pace import PrefillPace


def settled(pace: PrefillPace, seconds: Callable[[int], float], steps: int = 20) -> int:
    """The chunk beside decoding sequences after `steps` steps that took `seconds(tokens)`."""
    for _ in range(steps):
        tokens = pace.tokens(beside_decoding=True)
        pace.observe(tokens, seconds(tokens))
    return pace.tokens(beside_decoding=True)


@pytest.mark.parametrize(("rate", "expected"), [(5000, 512), (1024, 512), (1000, 256), (300, 128), (40, 16), (1, 16)])
def test_steps_are_cut_to_half_a_second(rate: float, expected: int) -> None:
    pace = PrefillPace(512)
    assert settled(pace, lambda tokens: tokens / rate) == expected
    assert pace.tokens(beside_decoding=False) == 512


def test_a_model_that_reads_all_experts_for_few_tokens_keeps_large_chunks() -> None:
    # 2 s for the weights, whatever the number of tokens.
    assert settled(PrefillPace(512), lambda tokens: 2.0 + tokens / 1000) == 256


def test_it_follows_the_speed_down_and_up() -> None:
    pace = PrefillPace(512)
    assert settled(pace, lambda tokens: tokens / 300) == 128
    assert settled(pace, lambda tokens: tokens / 100) == 32
    assert settled(pace, lambda tokens: tokens / 2000) == 512


def test_it_grows_back_from_a_size_tried_for_the_first_time() -> None:
    pace = PrefillPace(512)
    pace.observe(512, 100.0)
    assert pace.tokens(beside_decoding=True) == 16
    assert settled(pace, lambda tokens: tokens / 2000) == 512


def test_what_is_no_full_chunk_says_nothing() -> None:
    pace = PrefillPace(512)
    pace.observe(37, 100.0)
    assert pace.tokens(beside_decoding=True) == 512


@pytest.mark.parametrize("max_tokens", [1, 5, 31, 33])
def test_small_and_odd_chunks(max_tokens: int) -> None:
    pace = PrefillPace(max_tokens)
    assert settled(pace, lambda tokens: tokens / 0.1) == (max_tokens if max_tokens < 32 else 16)


def test_no_time_at_all() -> None:
    assert settled(PrefillPace(512), lambda _: 0.0) == 512
