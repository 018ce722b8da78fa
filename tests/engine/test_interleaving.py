"""Long passes over prompts and the answers that go on between their layers, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

import pytest
import torch
from fake_model import NO_GPU_MEMORY, NUM_LAYERS, RAISE, FakeModel, greedy
from harness import Harness, fake_engine

from proa.attention.batch import ForwardBatch, StillWanted
from proa.kvcache.pool import KVPool

DECODE_S, LONGEST_LAYER_S = 0.02, 0.09


class TimedModel(FakeModel):
    """A layer of prompts takes up to LONGEST_LAYER_S, a decode step DECODE_S."""

    def __init__(self, layer_s: Callable[[int], float]) -> None:
        super().__init__()
        self.tokens = 0  # of the pass that was begun last
        self.now = 0.0
        self._layer_s = layer_s
        self.passes: list[int] = []  # tokens of those between two layers

    def clock(self) -> float:
        return self.now

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        assert batch.num_single == batch.token_ids.numel(), "prompts of unknown length share no forward"
        self.now += DECODE_S
        return super().forward(batch, kv, still_wanted)

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        is_pass = batch.num_single < batch.token_ids.numel()
        depth = len(self.passes)
        if is_pass:
            assert depth < 2, "three passes at once"
            self.tokens = batch.token_ids.numel()
            self.passes.append(self.tokens)
        try:
            layers = super().layers(batch, kv, still_wanted)
            for layer in range(NUM_LAYERS + 1):
                assert len(self.passes) == depth + is_pass, "a pass went on while another one was between its layers"
                self.now += self._layer_s(layer) if is_pass else 0.0
                try:
                    yield next(layers)
                except StopIteration as end:
                    return end.value
        finally:
            if is_pass:
                self.passes.pop()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=length)


def timed(layer_s: Callable[[int], float] = lambda _: 0.05, **config: object) -> Harness:
    model = TimedModel(layer_s)
    settings = {"num_blocks": 800, "max_model_len": 1500, "chunked_prefill_size": 500, "max_decode_gap_ms": 200.0}
    return fake_engine(model=model, clock=model.clock, **{**settings, **config})


def gaps(harness: Harness, rid: str, until: str) -> list[float]:
    """Seconds between the tokens of `rid` up to the first of `until`."""
    times = []
    while not harness.results[until].tokens:
        before = len(harness.results[rid].tokens)
        harness.step()
        if len(harness.results[rid].tokens) > before:
            times.append(harness.model.now)
    times.append(harness.model.now)
    return [later - sooner for sooner, later in zip(times, times[1:], strict=False)]


@pytest.mark.parametrize("kind", ["even", "uneven", "growing"])
def test_running_answers_wait_no_longer_than_the_gap_and_a_layer(kind: str) -> None:
    rng = random.Random(0)
    layer_s = {
        "even": lambda _: 0.05,
        "uneven": lambda _: rng.uniform(0.001, LONGEST_LAYER_S),
        "growing": lambda layer: LONGEST_LAYER_S * layer / NUM_LAYERS,
    }[kind]
    harness = timed(layer_s)
    for i in range(3):
        harness.submit(f"r{i}", prompt(i, 5), max_tokens=1000)
    harness.step()
    harness.step()
    harness.submit("long", prompt(9, 1200), max_tokens=2)
    found = gaps(harness, "r1", "long")
    # Three passes of 101 stops, about one decode step in 0.2 s.
    assert len(found) > (20 if kind == "growing" else 50)
    assert max(found) <= 0.2 + LONGEST_LAYER_S
    if kind == "even":
        assert max(found) <= 0.2 + 1e-9
        # The prompt has most of the time: no decode step comes before it is due.
        assert sum(found) / len(found) > 0.15
    harness.run()
    assert harness.results["long"].tokens == greedy(prompt(9, 1200), 2)
    for i in range(3):
        assert harness.results[f"r{i}"].tokens == greedy(prompt(i, 5), 1000)


def test_a_short_prompt_is_in_the_next_pass_behind_a_long_one() -> None:
    harness = timed(chunked_prefill_size=100)
    harness.submit("long", prompt(1, 1000), max_tokens=2)
    harness.step()  # no answers run: a whole pass
    harness.submit("second", prompt(2, 900), max_tokens=2)
    harness.submit("short", prompt(3, 40), max_tokens=2)
    harness.step()
    assert harness.results["short"].tokens == greedy(prompt(3, 40), 1)
    assert harness.model.forwards == [100, 100]
    harness.run()
    assert harness.results["second"].tokens == greedy(prompt(2, 900), 2)


def test_a_much_shorter_pass_comes_first_every_second_time() -> None:
    harness = timed(chunked_prefill_size=100)
    harness.model._layer_s = lambda _: 0.01 + 0.0005 * harness.model.tokens
    harness.submit("known", prompt(8, 20), max_tokens=1)
    harness.run()
    harness.submit("long", prompt(1, 1000), max_tokens=1)
    harness.step()
    for i in range(30):
        harness.submit(f"short{i}", prompt(20 + i, 15), max_tokens=1)
        if not harness.results["long"].tokens:
            harness.step()
    harness.run()
    passes = harness.model.forwards[1:]
    assert passes[:3] == [100, 15, 100], "the first short one is alone, then the long one goes on, the next one with it"
    with_long = [index for index, tokens in enumerate(passes) if tokens > 50]
    assert all(later - sooner <= 2 for sooner, later in zip(with_long, with_long[1:], strict=False))
    assert harness.results["long"].tokens == greedy(prompt(1, 1000), 1)


def test_an_endless_row_of_short_prompts_starves_no_long_one() -> None:
    harness = timed(chunked_prefill_size=100, max_running_requests=4)
    harness.submit("long", prompt(1, 1000), max_tokens=1)
    passes = 0
    while not harness.results["long"].tokens:
        for i in range(2):
            harness.submit(f"s{passes}.{i}", prompt(10 + 2 * passes + i, 90), max_tokens=1)
        harness.step()
        passes += 1
        assert passes <= 2 * 10, "half of each pass belongs to the oldest"
    harness.run()


def test_the_most_prompts_of_a_pass() -> None:
    harness = timed(prefill_max_requests=1)
    for i in range(3):
        harness.submit(f"r{i}", prompt(i, 30), max_tokens=1)
    for i in range(3):
        harness.step()
        assert [rid for rid, result in harness.results.items() if result.tokens] == [f"r{j}" for j in range(i + 1)]
    assert harness.model.forwards == [30, 30, 30]


def test_an_answer_preempts_a_prompt_that_is_between_two_layers() -> None:
    # 40 blocks of 4: the answer grows into the blocks of the prompt while that is being computed.
    harness = timed(num_blocks=40, max_model_len=160)
    harness.submit("answer", prompt(1, 70), max_tokens=80)
    harness.step()
    harness.submit("prompt", prompt(2, 70), max_tokens=10)
    harness.run()
    assert harness.engine._scheduler.num_preempted > 0
    assert harness.results["answer"].tokens == greedy(prompt(1, 70), 80)
    assert harness.results["prompt"].tokens == greedy(prompt(2, 70), 10)


def test_answers_that_are_due_and_prompts_that_are_preempted_lose_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # Half the blocks that all need together; some passes are planned when answers are due.
    rng = random.Random(1)
    harness = timed(num_blocks=60, max_model_len=200, max_decode_gap_ms=300.0, chunked_prefill_size=40)
    prompts = {f"r{i}": prompt(i, rng.randrange(5, 90)) for i in range(12)}
    for rid, tokens in prompts.items():
        harness.submit(rid, tokens, max_tokens=60)
        harness.step()
    while harness.engine.has_work:
        harness.step()
        # A pass that was planned has begun: else it would write to the blocks of who is preempted meanwhile.
        assert (harness.engine.running_pass is not None) == (len(harness.model.passes) > 0)
    assert harness.engine._scheduler.num_preempted > 3
    assert not caplog.records, "nothing failed and was tried again"
    for rid, tokens in prompts.items():
        assert harness.results[rid].tokens == greedy(tokens, 60)


def test_a_prompt_that_fails_between_decode_steps_fails_alone() -> None:
    harness = timed()
    harness.submit("answer", prompt(1, 5), max_tokens=100)
    harness.step()
    harness.submit("bad", [*prompt(2, 50), RAISE], max_tokens=3)
    harness.submit("good", prompt(3, 60), max_tokens=3)
    harness.run()
    assert harness.results["bad"].finish_reason == "error"
    assert harness.results["good"].tokens == greedy(prompt(3, 60), 3)
    assert harness.results["answer"].tokens == greedy(prompt(1, 5), 100)


def test_who_aborts_leaves_a_pass_that_stands_between_two_layers() -> None:
    harness = timed()
    harness.submit("answer", prompt(1, 5), max_tokens=400)
    harness.step()
    for rid in ("gone", "stays"):
        harness.submit(rid, prompt(len(rid), 60), max_tokens=3)
    harness.step()
    assert harness.engine.running_pass is not None
    harness.engine.abort("gone")
    harness.submit("new", prompt(4, 20), max_tokens=3)
    harness.run()
    assert harness.results["gone"].finish_reason == "abort"
    assert harness.results["stays"].tokens == greedy(prompt(5, 60), 3)
    assert harness.results["new"].tokens == greedy(prompt(4, 20), 3)


def test_progress_is_told_within_a_pass() -> None:
    harness = timed()
    harness.submit("long", prompt(1, 1000), max_tokens=1)
    harness.run()
    done = [tokens for _, tokens in harness.progress]
    # Passes of 5 s, told twice a second.
    assert 18 <= len(done) <= 22 and done == sorted(done) and 500 in done and done[-1] > 900


# A layer of 500 tokens takes 50 ms, one of 20 tokens 2 ms, and a pass has 101 of them.
TOKEN_S = 0.0001


def in_proportion(**config: object) -> Harness:
    """An engine that knows how long its passes take, an answer that runs, and a long prompt in the middle of a pass."""
    harness = timed(**config)
    model = harness.model
    model._layer_s = lambda _: TOKEN_S * model.passes[-1]
    for tokens in (500, 20):
        harness.submit(f"known{tokens}", prompt(tokens, tokens), max_tokens=1)
        harness.run()
    harness.submit("answer", prompt(1, 5), max_tokens=1400)
    harness.step()
    harness.submit("long", prompt(2, 500), max_tokens=3)
    while harness.engine.running_pass is None or harness.engine.running_pass.share_done < 0.2:
        harness.step()
    return harness


def test_a_short_prompt_overtakes_a_long_pass_between_two_of_its_layers() -> None:
    harness = in_proportion()
    asked = harness.model.now
    harness.submit("short", prompt(3, 20), max_tokens=3)
    found = gaps(harness, "answer", "short")
    assert harness.model.now - asked < 0.6, "its own 0.2 s, a layer and two steps, and not what is left of 5 s"
    assert not harness.results["long"].tokens and harness.engine.running_pass.num_tokens == 500
    found += gaps(harness, "answer", "long")
    assert max(found) <= 0.2 + 0.05 + 1e-9
    harness.run()
    for rid, tokens in (("short", prompt(3, 20)), ("long", prompt(2, 500))):
        assert harness.results[rid].tokens == greedy(tokens, 3)
    assert harness.results["answer"].tokens == greedy(prompt(1, 5), 1400)


def test_a_long_pass_takes_at_most_twice_as_long_for_those_that_overtake_it() -> None:
    harness = in_proportion()
    # As many steps to the answer come in the time, and in that the overtaking takes.
    started, before = harness.model.now, len(harness.results["answer"].tokens)
    count = 0
    while not harness.results["long"].tokens:
        harness.submit(f"short{count}", prompt(100 + count, 20), max_tokens=1)
        while not harness.results[f"short{count}"].tokens and not harness.results["long"].tokens:
            harness.step()
        count += 1
        assert count < 100
    steps = len(harness.results["answer"].tokens) - before
    assert harness.model.now - started - steps * DECODE_S <= 2 * 101 * 500 * TOKEN_S
    assert count > 20
    harness.run()
    assert harness.results["long"].tokens == greedy(prompt(2, 500), 3)


def test_what_is_not_much_shorter_waits() -> None:
    harness = in_proportion()
    harness.submit("middle", prompt(3, 400), max_tokens=1)
    harness.run()
    assert harness.model.forwards.count(400) == 1
    harness = timed()  # nothing is known of its passes
    harness.submit("long", prompt(2, 500), max_tokens=1)
    harness.submit("answer", prompt(1, 5), max_tokens=50)
    harness.step()
    harness.submit("short", prompt(3, 20), max_tokens=1)
    while not harness.results["short"].tokens:
        harness.step()
    assert harness.results["long"].tokens


@pytest.mark.parametrize("gone", ["short", "long", "both"])
def test_who_aborts_while_one_pass_is_between_the_layers_of_another(gone: str) -> None:
    harness = in_proportion()
    harness.submit("short", prompt(3, 20), max_tokens=3)
    harness.model._layer_s = lambda _: 0.1  # the next step to the answer comes in the middle
    harness.step()
    assert harness.model.passes == [500, 20]
    for rid in ("short", "long") if gone == "both" else (gone,):
        harness.engine.abort(rid)
    harness.submit("new", prompt(4, 30), max_tokens=3)
    harness.run()
    for rid, tokens in (("short", prompt(3, 20)), ("long", prompt(2, 500)), ("new", prompt(4, 30))):
        if gone in (rid, "both") and rid != "new":
            assert harness.results[rid].finish_reason == "abort"
        else:
            assert harness.results[rid].tokens == greedy(tokens, 3)
    harness.engine.check_integrity()


@pytest.mark.parametrize("fault", [RAISE, NO_GPU_MEMORY])
def test_a_prompt_that_fails_between_the_layers_of_a_pass_fails_alone(fault: int) -> None:
    harness = in_proportion()
    harness.submit("bad", [*prompt(3, 19), fault], max_tokens=3)
    harness.submit("good", prompt(4, 30), max_tokens=3)
    harness.run()
    assert harness.results["bad"].finish_reason == "error"
    assert harness.results["good"].tokens == greedy(prompt(4, 30), 3)
    assert harness.results["long"].tokens == greedy(prompt(2, 500), 3)
    assert harness.results["answer"].tokens == greedy(prompt(1, 5), 1400)
    harness.engine.check_integrity()
