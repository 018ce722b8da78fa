"""The engine around tiny random models on the native kernels: what runs around a request changes no bit of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from time import perf_counter

import pytest
from harness import Harness, Result
from tests.models.variants import VARIANTS, VOCAB, build

from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint

# One token, whole blocks and chunks, and lengths that are neither.
PROMPT_LENGTHS = (1, 16, 22, 32, 39, 64, 90, 128)
NUM_SEQUENCES = len(PROMPT_LENGTHS)
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["bf16", "int4_g32"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    directory = tmp_path_factory.mktemp("model") / request.param
    write_random_model(directory, DIMENSIONS["tiny"], tokenizer, format=request.param)
    return directory


@pytest.fixture(scope="module", params=["deepseek_bf16", "kimi_fp8", "glm_tied_int4"])
def other_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    build(next(variant for variant in VARIANTS if variant.name == request.param), directory)
    return directory


def prompt(index: int) -> list[int]:
    return random.Random(index).choices(range(VOCAB), k=PROMPT_LENGTHS[index])


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


def check_all_ways(checkpoint: Path, **config: object) -> None:
    """Alone, batched, prefix-cached, chunked, interleaved and preempted: the same bits."""
    one_by_one = load(checkpoint, max_running_requests=1, disable_radix_cache=True, num_threads=1, **config)
    alone = run_all(one_by_one, "alone")
    assert len({tuple(result.tokens) for result in alone}) == NUM_SEQUENCES

    harness = load(checkpoint, **config)
    assert same(run_all(harness, "batched"), alone)
    again = run_all(harness, "cached")
    # Of a prompt of 128 tokens all but the last block, which is computed again for its logits.
    assert same(again, alone) and again[-1].cached_tokens == 112
    for chunk in (5, 16):
        assert same(run_all(load(checkpoint, chunked_prefill_size=chunk, **config), "chunked"), alone)
    # A decode step after every layer of a pass.
    interleaved = load(checkpoint, chunked_prefill_size=60, max_decode_gap_ms=0.001, **config)
    assert same(run_all(interleaved, "interleaved"), alone)
    for block_size in (1, 7, 64):
        assert same(run_all(load(checkpoint, block_size=block_size, **config), "blocks"), alone)

    # The longest sequence takes 152 tokens, all together more than three times as much.
    tight = load(checkpoint, max_total_tokens=160, **config)
    assert same(run_all(tight, "preempted"), alone)
    assert tight.engine._scheduler.num_preempted > 0


def test_alone_batched_chunked_cached_and_preempted_give_the_same_bits(checkpoint: Path) -> None:
    check_all_ways(checkpoint)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_for_other_families_and_caches(other_family: Path, dtype: str) -> None:
    check_all_ways(other_family, kv_cache_dtype=dtype)


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


def test_routing_is_recorded(checkpoint: Path) -> None:
    """Tokens that pass a layer times top-k; the last layer routes the rows whose logits are wanted."""
    harness = load(checkpoint)
    engine, size = harness.engine, DIMENSIONS["tiny"]
    assert engine.record_experts("dump") is None
    harness.generate([7, 8], "before", max_tokens=2)
    assert engine.record_experts("start") is None
    harness.generate(list(range(10)), "during", max_tokens=4)
    assert engine.record_experts("stop") is None
    harness.generate([9, 8], "after", max_tokens=2)
    counts = engine.record_experts("dump")
    assert counts is not None
    # 10 prompt tokens and 3 of the answer's 4, the last of which is never fed back.
    assert [sum(layer) for layer in counts] == [13 * size.top_k] * (size.num_layers - 1) + [4 * size.top_k]
    assert {len(layer) for layer in counts} == {size.num_experts}
    assert engine.record_experts("dump") is None


def test_scratch_memory_counts_as_used(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reserve, and 16 MB for weights and KV cache: enough for 4096 tokens, but not beside the scratch of 60000.
    monkeypatch.setattr("proa.engine.load.available_bytes", lambda: 2**30 + 16_000_000)
    load(checkpoint)
    with pytest.raises(ConfigError, match="GiB weights and scratch"):
        load(checkpoint, chunked_prefill_size=60_000)


def test_what_a_gpu_is_told_is_said_to_be_unused_on_the_cpu(checkpoint: Path) -> None:
    given = {"gpu_experts": 8, "expert_updates": True, "attention_backend": "torch", "cuda_graph_max_bs": 3}

    def info(**more: int) -> dict[str, str]:
        fields = {"model_path": str(checkpoint), "device": "cpu", "max_total_tokens": 512, **given, **more}
        config = EngineConfig(to_engine="", from_engine="", **fields)
        return load_checkpoint(config, lambda done, total: None).info

    unused = {name for name, text in info(max_running_requests=2).items() if text.startswith("not used")}
    assert unused == given.keys()
    found = info()
    assert "bounds --max-running-requests" in found["cuda_graph_max_bs"] and found["max_running_requests"][0] in "123"
