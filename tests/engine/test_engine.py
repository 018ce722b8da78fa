from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_model import NAN_LOGITS, POINT_MASS, RAISE, greedy
from harness import EOS, fake_engine


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=length)


def test_tokens_are_those_of_the_model_without_cache() -> None:
    assert fake_engine().generate(prompt(0, 10), max_tokens=40).tokens == greedy(prompt(0, 10), 40)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("radix", [True, False])
def test_same_tokens_batched_chunked_and_alone(chunk: int, radix: bool) -> None:
    harness = fake_engine(chunked_prefill_size=chunk, disable_radix_cache=not radix)
    for i in range(8):
        harness.submit(f"r{i}", prompt(i, 5 + 6 * i), max_tokens=12)
    harness.run()
    for i in range(8):
        assert harness.results[f"r{i}"].tokens == greedy(prompt(i, 5 + 6 * i), 12)


def test_progress_is_told_at_the_end_of_each_chunk_but_the_last() -> None:
    harness = fake_engine(chunked_prefill_size=8)
    harness.submit("a", list(range(3, 23)), max_tokens=3)
    harness.run()
    assert harness.progress == [("a", 8), ("a", 16)]


def test_prefill_chunks_run_beside_decode() -> None:
    harness = fake_engine(chunked_prefill_size=8)
    harness.submit("decoding", prompt(1, 4), max_tokens=30)
    harness.step()
    harness.submit("long", prompt(2, 100), max_tokens=2)
    before = len(harness.results["decoding"].tokens)
    while not harness.results["long"].tokens:
        harness.step()
    # 100 tokens in chunks of 8 are 13 steps, and the other got a token in each.
    assert len(harness.results["decoding"].tokens) - before == 13
    assert 8 + 1 in harness.model.forwards
    assert max(harness.model.forwards) <= 8 + 1
    harness.run()
    assert harness.results["decoding"].tokens == greedy(prompt(1, 4), 30)
    assert harness.results["long"].tokens == greedy(prompt(2, 100), 2)


def test_cached_prefix_gives_the_same_tokens_and_is_counted() -> None:
    harness = fake_engine()
    base = prompt(3, 21)
    first = harness.generate(base, "first", max_tokens=9)
    again = harness.generate(base, "again", max_tokens=9)
    longer = harness.generate(base + first.tokens + [77], "longer", max_tokens=9)
    assert (first.cached_tokens, again.cached_tokens) == (0, 20)
    # The last of 9 tokens was never computed: 29 of 30 are in the cache, 7 whole blocks.
    assert longer.cached_tokens == 28
    assert first.tokens == again.tokens == greedy(base, 9)
    assert longer.tokens == greedy(base + first.tokens + [77], 9)
    stats = harness.engine.stats()
    assert stats.prefix_hit_tokens == 48
    assert stats.prompt_tokens == 21 + 21 + 31
    assert stats.generation_tokens == 27
    assert stats.expert_bytes_read == 1000 * len(harness.model.forwards)
    assert stats.expert_ms == pytest.approx(2.0 * len(harness.model.forwards))


def test_wholly_cached_prompt_computes_its_last_block_again() -> None:
    harness = fake_engine()
    base = prompt(4, 16)
    harness.generate(base, "first", max_tokens=8)
    again = harness.generate(base, "again", max_tokens=8)
    assert again.cached_tokens == 12
    assert again.tokens == greedy(base, 8)


def test_choices_of_a_group_prefill_once() -> None:
    harness = fake_engine(chunked_prefill_size=16)
    base = prompt(5, 50)
    for i in range(6):
        harness.submit(f"c{i}", base, max_tokens=5, temperature=1.0, seed=i)
    harness.run()
    # One prefills 50 tokens; each of the others finds 48 and computes 2.
    assert sum(harness.model.forwards) == 50 + 5 * 2 + 6 * 4
    assert len({tuple(harness.results[f"c{i}"].tokens) for i in range(6)}) > 1
    alone = fake_engine().generate(base, max_tokens=5, temperature=1.0, seed=3)
    assert harness.results["c3"].tokens == alone.tokens


def test_choices_survive_the_abort_of_the_one_that_prefills() -> None:
    harness = fake_engine(chunked_prefill_size=8)
    for i in range(3):
        harness.submit(f"c{i}", prompt(5, 50), max_tokens=3)
    harness.step()
    harness.engine.abort("c0")
    harness.run()
    assert harness.results["c0"].finish_reason == "abort"
    assert harness.results["c1"].tokens == harness.results["c2"].tokens == greedy(prompt(5, 50), 3)


def test_a_stranger_passes_requests_that_wait_for_a_prefix() -> None:
    harness = fake_engine(chunked_prefill_size=8)
    harness.submit("a", prompt(5, 44), max_tokens=1)
    harness.submit("b", prompt(5, 44) + [20] * 6, max_tokens=1)
    harness.submit("c", prompt(6, 4), max_tokens=1)
    for _ in range(6):  # the last chunk of `a` leaves room for 4 tokens, and `b` wants the block it is computing
        harness.step()
    assert [harness.results[rid].finish_reason for rid in "abc"] == ["length", None, "length"]
    harness.run()
    assert harness.results["b"].cached_tokens == 44


@pytest.mark.parametrize("radix", [True, False])
def test_preemption_loses_nothing(radix: bool) -> None:
    harness = fake_engine(num_blocks=20, disable_radix_cache=not radix)
    for i in range(6):
        harness.submit(f"r{i}", prompt(i, 8), max_tokens=30, temperature=float(i % 2), seed=i, presence_penalty=0.3)
    harness.run()
    assert harness.engine._scheduler.num_preempted > 0
    for i in range(6):
        alone = fake_engine().generate(
            prompt(i, 8), max_tokens=30, temperature=float(i % 2), seed=i, presence_penalty=0.3
        )
        assert harness.results[f"r{i}"].tokens == alone.tokens
        assert harness.results[f"r{i}"].cached_tokens == 0


def test_oldest_is_never_preempted_and_ends_first() -> None:
    harness = fake_engine(num_blocks=12, max_model_len=48)
    for i in range(4):
        harness.submit(f"r{i}", prompt(i, 8), max_tokens=40)
    order = []
    while harness.engine.has_work:
        harness.step()
        order += [r for r in harness.results if harness.results[r].finish_reason and r not in order]
    assert order == ["r0", "r1", "r2", "r3"]
    assert all(result.tokens == greedy(prompt(int(r[1]), 8), 40) for r, result in harness.results.items())


class AfterPolls:
    """Calls `action` when a step polls for the `count`-th time."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left = count
        self._action = action

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()


@pytest.mark.parametrize("gone", ["r0", "r1", "r3"])
@pytest.mark.parametrize("decoding", [False, True])
def test_abort_between_layers_leaves_the_others_alone(gone: str, decoding: bool) -> None:
    harness = fake_engine(num_blocks=16)
    for i in range(4):
        harness.submit(f"r{i}", prompt(i, 6 + i), max_tokens=6)
    if decoding:
        harness.step()
    engine = harness.engine

    def abort() -> None:
        used = engine.stats().kv_tokens_used
        engine.abort(gone)
        assert engine.stats().kv_tokens_used < used
        engine._manager.check_integrity()
        harness.submit("new", prompt(9, 9), max_tokens=6)

    harness.step(AfterPolls(2, abort))
    assert harness.results[gone].finish_reason == "abort"
    assert len(harness.results[gone].tokens) == decoding
    harness.run()
    for rid, length, seed in [("r0", 6, 0), ("r1", 7, 1), ("r2", 8, 2), ("r3", 9, 3), ("new", 9, 9)]:
        if rid != gone:
            assert harness.results[rid].tokens == greedy(prompt(seed, length), 6)


def test_abort_of_everything_between_layers_ends_the_step() -> None:
    harness = fake_engine()
    for i in range(3):
        harness.submit(f"r{i}", prompt(i, 6), max_tokens=6)
    harness.step(AfterPolls(1, lambda: harness.engine.abort("")))
    assert not harness.engine.has_work
    assert {result.finish_reason for result in harness.results.values()} == {"abort"}
    assert harness.engine.flush()
    assert harness.generate(prompt(1, 6), max_tokens=3).tokens == greedy(prompt(1, 6), 3)


def test_abort_between_layers_of_a_forward_that_then_fails() -> None:
    harness = fake_engine()
    harness.submit("gone", prompt(1, 6), max_tokens=3)
    harness.submit("stays", prompt(2, 6), max_tokens=3)
    attempts = 0

    def fail_once() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            harness.engine.abort("gone")
            raise RuntimeError("polling failed")

    harness.step(fail_once)
    harness.run()
    assert harness.results["gone"].finish_reason == "abort"
    assert harness.results["stays"].tokens == greedy(prompt(2, 6), 3)


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_abort_frees_blocks_at_once(stage: str) -> None:
    harness = fake_engine(chunked_prefill_size=8, max_running_requests=1)
    if stage == "queue":
        harness.submit("other", prompt(1, 4), max_tokens=5)
        harness.step()
    harness.submit("gone", prompt(2, 40), max_tokens=50)
    for _ in range({"queue": 1, "prefill": 2, "decode": 8}[stage]):
        harness.step()
    gone = harness.results["gone"]
    assert bool(gone.tokens) == (stage == "decode")
    harness.engine.abort("gone")
    harness.engine._manager.check_integrity()
    if stage != "queue":
        assert harness.engine.stats().kv_tokens_used == 0
    harness.run()
    assert gone.finish_reason == "abort"
    assert harness.engine.stats().aborted == 1
    if stage == "queue":
        assert harness.results["other"].tokens == greedy(prompt(1, 4), 5)


def test_abort_of_everything_and_of_nothing() -> None:
    harness = fake_engine()
    harness.engine.abort("never heard of")
    assert not harness.engine.has_work
    for i in range(12):
        harness.submit(f"r{i}", prompt(i, 9), max_tokens=50)
    harness.step()
    harness.engine.abort("")
    harness.run()
    assert {result.finish_reason for result in harness.results.values()} == {"abort"}
    assert harness.engine.stats().aborted == 12


def test_flush_empties_the_cache_only_when_idle() -> None:
    harness = fake_engine()
    harness.submit("a", prompt(1, 20), max_tokens=3)
    harness.step()
    assert not harness.engine.flush()
    harness.run()
    assert harness.engine.flush()
    assert harness.engine._manager.num_cached == 0
    assert harness.generate(prompt(1, 20), "b", max_tokens=3).cached_tokens == 0


def test_ends_at_eos_at_stop_ids_and_at_limits() -> None:
    base = prompt(7, 6)
    expected = greedy(base, 30)
    stop = expected[4]
    assert stop not in expected[:4]
    result = fake_engine().generate(base, max_tokens=30, stop_token_ids=(stop,))
    assert (result.tokens, result.finish_reason, result.matched_stop) == (expected[:5], "stop", stop)
    result = fake_engine().generate(base, max_tokens=4)
    assert (result.tokens, result.finish_reason, result.matched_stop) == (expected[:4], "length", None)
    result = fake_engine(max_model_len=16).generate(base, max_tokens=30)
    assert (result.tokens, result.finish_reason) == (expected[:10], "length")
    result = fake_engine().generate(base, max_tokens=0)
    assert (result.tokens, result.finish_reason) == ([], "length")


def test_eos_min_tokens_and_ignore_eos() -> None:
    force_eos = {EOS: 100.0}
    result = fake_engine().generate(prompt(8, 6), max_tokens=9, ignore_eos=False, logit_bias=force_eos)
    assert (result.tokens, result.finish_reason, result.matched_stop) == ([EOS], "stop", EOS)
    result = fake_engine().generate(prompt(8, 6), max_tokens=9, ignore_eos=False, logit_bias=force_eos, min_tokens=4)
    assert (len(result.tokens), result.tokens.index(EOS), result.finish_reason) == (5, 4, "stop")
    result = fake_engine().generate(prompt(8, 6), max_tokens=9, ignore_eos=True, logit_bias=force_eos)
    assert (result.tokens, result.finish_reason) == ([EOS] * 9, "length")
    masked = fake_engine().generate(
        prompt(8, 6), max_tokens=6, min_tokens=3, stop_token_ids=(11, 12), logit_bias={11: 90.0, 12: 80.0}
    )
    assert not {11, 12} & set(masked.tokens[:3]) and masked.tokens[3:] == [11]


def test_seeded_tokens_do_not_depend_on_the_batch() -> None:
    alone = fake_engine().generate(prompt(9, 6), max_tokens=20, temperature=1.5, seed=4)
    harness = fake_engine(chunked_prefill_size=3)
    for i in range(7):
        harness.submit(f"x{i}", prompt(i, 7), max_tokens=25, temperature=1.0)
    harness.step()
    harness.submit("seeded", prompt(9, 6), max_tokens=20, temperature=1.5, seed=4)
    harness.run()
    assert harness.results["seeded"].tokens == alone.tokens
    assert fake_engine().generate(prompt(9, 6), max_tokens=20, temperature=1.5, seed=5).tokens != alone.tokens


def test_without_seed_answers_differ_unless_the_engine_has_one() -> None:
    def two(**config: int) -> list[list[int]]:
        harness = fake_engine(**config)
        return [harness.generate(prompt(1, 5), rid, max_tokens=20, temperature=1.5).tokens for rid in "ab"]

    first, second = two(), two()
    assert len({tuple(tokens) for tokens in first + second}) == 4
    assert two(random_seed=7) == two(random_seed=7)


def test_logprobs_are_of_the_raw_logits() -> None:
    result = fake_engine().generate(prompt(1, 5), max_tokens=4, logprobs=3, logit_bias={20: 100.0})
    assert result.tokens == [20] * 4
    for entry in result.logprobs:
        assert entry.token_id == 20
        assert len(entry.top) == 3 and entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1] >= entry.logprob
    plain = fake_engine().generate(prompt(1, 5), max_tokens=1, logprobs=0)
    assert plain.logprobs[0].top == [] and plain.logprobs[0].logprob < 0.0


@pytest.mark.parametrize("bad", [RAISE, NAN_LOGITS])
def test_a_fault_ends_its_request_and_no_other(bad: int) -> None:
    harness = fake_engine(chunked_prefill_size=200)
    for i in range(4):
        harness.submit(f"r{i}", prompt(i, 12), max_tokens=10)
    harness.step()
    harness.submit("bad", [*prompt(50, 9), bad], max_tokens=10)
    harness.submit("late", prompt(60, 12), max_tokens=10)
    harness.run()
    failed = harness.results["bad"]
    assert failed.finish_reason == "error" and failed.tokens == []
    assert ("told to fail" if bad == RAISE else "nan") in failed.error
    for i in range(4):
        assert harness.results[f"r{i}"].tokens == greedy(prompt(i, 12), 10)
    assert harness.results["late"].tokens == greedy(prompt(60, 12), 10)
    # What the failed request computed is not served to the next.
    assert harness.generate([*prompt(50, 9), 11], "next", max_tokens=4).cached_tokens == 0


def test_nan_after_a_first_good_chunk_forgets_that_chunk() -> None:
    harness = fake_engine(chunked_prefill_size=8)
    harness.generate([*prompt(50, 17), NAN_LOGITS], "bad", max_tokens=10)
    assert harness.results["bad"].finish_reason == "error"
    assert harness.engine._manager.num_cached == 0


def test_point_mass_is_sampled() -> None:
    result = fake_engine().generate([POINT_MASS, 11], max_tokens=5, temperature=2.0, top_p=0.5, top_k=50, min_p=0.1)
    assert result.tokens == [3] * 5


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([], {}, "at least one"),
        ([1] * 512, {}, "fewer than 256"),
        ([512], {}, "0 .. 511"),
        ([-1], {}, "0 .. 511"),
        ([1], {"logit_bias": {512: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_what_cannot_run_is_answered_with_an_error(tokens: list[int], sampling: dict, message: str) -> None:
    result = fake_engine().generate(tokens, max_tokens=3, **sampling)
    assert result.finish_reason == "error" and message in result.error


def test_a_second_request_of_the_same_name_is_dropped() -> None:
    harness = fake_engine()
    harness.submit("a", prompt(1, 5), max_tokens=5)
    harness.submit("a", prompt(2, 5), max_tokens=5)
    harness.run()
    assert harness.results["a"].tokens == greedy(prompt(1, 5), 5)


def test_longest_possible_request_runs_in_a_cache_of_exactly_its_size() -> None:
    harness = fake_engine(num_blocks=8, max_model_len=32, max_running_requests=3)
    for i in range(3):
        harness.submit(f"r{i}", prompt(i, 20), max_tokens=999)
    harness.run()
    for i in range(3):
        assert harness.results[f"r{i}"].tokens == greedy(prompt(i, 20), 12)


def test_random_requests_and_aborts_leak_nothing() -> None:
    rng = random.Random(0)
    harness = fake_engine(num_blocks=40, max_model_len=120, chunked_prefill_size=16)
    unfinished: dict[str, tuple[list[int], int]] = {}
    for number in range(3000):
        rid = f"r{number}"
        length = rng.choice([1, 3, 4, 8, 20, 50])
        tokens = prompt(rng.randrange(5), length) + rng.choices(range(10, 500), k=rng.choice([0, 1, 6]))
        if rng.random() < 0.02:
            tokens.append(RAISE if rng.random() < 0.5 else NAN_LOGITS)
        unfinished[rid] = (tokens, rng.randrange(1, 25))
        harness.submit(rid, tokens, max_tokens=unfinished[rid][1])
        if rng.random() < 0.25 and harness.engine._requests:
            harness.engine.abort(rng.choice(list(harness.engine._requests)))
        for _ in range(rng.choice([0, 1, 3]) + (4 if len(harness.engine._requests) > 30 else 0)):
            if harness.engine.has_work:
                harness.step()
        if number % 50 == 0:
            harness.engine._manager.check_integrity()
    harness.run(max_steps=100_000)
    assert harness.engine.stats().kv_tokens_used == 0
    reasons = [result.finish_reason for result in harness.results.values()]
    assert reasons.count("length") > 1500 and reasons.count("abort") > 100 and reasons.count("error") > 10
    for rid in rng.sample(list(unfinished), 300):
        tokens, count = unfinished[rid]
        result = harness.results[rid]
        if result.finish_reason == "length":
            assert result.tokens == greedy(tokens, count)
        elif result.finish_reason == "abort":
            assert result.tokens == greedy(tokens, len(result.tokens))
    harness.engine.flush()
    assert harness.engine._manager.num_available == 40


@pytest.mark.parametrize("sampling", [{"temperature": float("nan")}, {"temperature": 1.0, "min_p": 2.0}])
def test_parameters_that_break_the_sampler_end_only_their_request(sampling: dict[str, float]) -> None:
    harness = fake_engine()
    harness.submit("bad", prompt(1, 5), max_tokens=3, **sampling)
    harness.submit("good", prompt(2, 5), max_tokens=3)
    harness.run()
    assert harness.results["bad"].finish_reason == "error"
    assert harness.results["good"].tokens == greedy(prompt(2, 5), 3)
