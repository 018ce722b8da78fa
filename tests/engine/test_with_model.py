"""The engine around a tiny random model on the native kernels: what runs around a request changes no bit of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from time import perf_counter

import pytest
from harness import Harness, Result

from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint

VOCAB_SIZE = 320
NUM_SEQUENCES = 8
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["bf16", "int4_g32"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {f"t{i}": i for i in range(VOCAB_SIZE)}
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    directory = tmp_path_factory.mktemp("model") / request.param
    write_random_model(directory, DIMENSIONS["tiny"], tokenizer, format=request.param)
    return directory


def prompt(index: int) -> list[int]:
    return random.Random(index).choices(range(VOCAB_SIZE), k=5 + 17 * index)


def submit(harness: Harness, index: int, rid: str) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": index} if index % 2 else {"temperature": 0.0}
    harness.submit(rid, prompt(index), max_tokens=NUM_TOKENS, logprobs=2, **sampling)


def load(checkpoint: Path, **config: object) -> Harness:
    settings = {"max_running_requests": 8, "max_total_tokens": 4096, "num_threads": 2, **config}
    engine_config = EngineConfig(model_path=str(checkpoint), to_engine="", from_engine="", **settings)
    return Harness(engine_config, load_checkpoint(engine_config, lambda done, total: None))


def run_all(harness: Harness, name: str) -> list[Result]:
    for index in range(NUM_SEQUENCES):
        submit(harness, index, f"{name}{index}")
    harness.run()
    return [harness.results[f"{name}{index}"] for index in range(NUM_SEQUENCES)]


def same(first: list[Result], second: list[Result]) -> bool:
    """Tokens and, to the last bit, log-probabilities."""
    return [(r.tokens, r.logprobs) for r in first] == [(r.tokens, r.logprobs) for r in second]


def test_alone_batched_chunked_cached_and_preempted_give_the_same_bits(checkpoint: Path) -> None:
    one_by_one = load(checkpoint, max_running_requests=1, disable_radix_cache=True, num_threads=1)
    alone = run_all(one_by_one, "alone")
    assert len({tuple(result.tokens) for result in alone}) == NUM_SEQUENCES

    harness = load(checkpoint)
    assert same(run_all(harness, "batched"), alone)
    again = run_all(harness, "cached")
    assert same(again, alone) and again[-1].cached_tokens >= 96
    assert same(run_all(load(checkpoint, chunked_prefill_size=5), "chunked"), alone)

    # The longest sequence takes 148 tokens, all together more than three times as much.
    tight = load(checkpoint, max_total_tokens=160)
    assert same(run_all(tight, "preempted"), alone)
    assert tight.engine._scheduler.num_preempted > 0


def test_expert_traffic_is_what_the_model_read(checkpoint: Path) -> None:
    harness = load(checkpoint)
    assert (harness.engine.stats().expert_bytes_read, harness.engine.stats().expert_ms) == (0, 0)
    started = perf_counter()
    harness.generate([7], "one", max_tokens=1)
    elapsed_ms = (perf_counter() - started) * 1e3
    stats = harness.engine.stats()
    size = DIMENSIONS["tiny"]
    bits = 16 if checkpoint.name == "bf16" else 4 + 16 / 32
    expert_bytes = 3 * size.hidden_size * size.moe_intermediate_size * bits / 8
    padding = stats.expert_bytes_read / (size.num_layers * size.top_k) - expert_bytes
    # Panels of 16 rows start on whole cache lines: 2 + 2 of [32, 64], 4 of [64, 32].
    assert 0 <= padding < 8 * 64
    assert 0 < stats.expert_ms < elapsed_ms
