from __future__ import annotations

import pytest
from tests.plan.models import KIMI_K2, write_config

from proa.cli.fit import ways_to_fit
from proa.engine.config import EngineConfig
from proa.plan.advice import cheapest_ways
from proa.plan.hardware import GIB, Machine, Overrides, probe
from proa.plan.memory_plan import plan_memory
from proa.plan.model_sizes import read_sizes


def config(path, **values):
    return EngineConfig(model_path=str(path), to_engine="", from_engine="", device="cpu", **values)


@pytest.fixture(autouse=True)
def ram(monkeypatch):
    """What is free here changes from one moment to the next."""
    monkeypatch.setattr("proa.plan.hardware.available_bytes", lambda: 8 * GIB)


def test_ways_are_those_of_the_plan_in_the_words_of_serve(tmp_path):
    path = write_config(tmp_path, KIMI_K2)
    machine = probe(Overrides(vram=0.0, bandwidth=1.0))
    given = config(path, context_length=4096)
    planned = [way.words for way in cheapest_ways(read_sizes(path), machine, given)]
    assert ways_to_fit(given) == planned and planned, "no flag of this model fits a small machine, only more RAM"


def test_flags_of_serve(tmp_path):
    path = write_config(tmp_path, KIMI_K2 | {"num_hidden_layers": 2, "n_routed_experts": 8})
    ways = ways_to_fit(config(path, max_total_tokens=10**12))
    assert ways[0].startswith("--max-total-tokens ")
    tokens = int(ways[0].split()[1])
    sizes, machine = read_sizes(path), probe(Overrides(vram=0.0, bandwidth=1.0))
    assert plan_memory(sizes, machine, config(path, max_total_tokens=tokens)).fits
    assert not plan_memory(sizes, machine, config(path, max_total_tokens=tokens + 1024)).fits


def test_what_cannot_be_read_has_no_ways(tmp_path):
    assert ways_to_fit(config(tmp_path)) == []


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({"mem_fraction_static": 0.1}, "without --mem-fraction-static"),
        ({"chunked_prefill_size": 65536}, "without --chunked-prefill-size"),
        ({"max_total_tokens": 10**9}, "--max-total-tokens "),
        ({"max_total_tokens": 10**9, "context_length": 4096}, "--max-total-tokens "),
        (
            {"chunked_prefill_size": 65536, "cuda_graph_max_bs": 256, "max_total_tokens": 10**9},
            "--cuda-graph-max-bs 16, without ",
        ),
        ({"context_length": 262144, "kv_cache_dtype": "float32"}, "--kv-cache-dtype bfloat16"),
        ({"context_length": 262144}, "--context-length "),
    ],
)
def test_flags_that_ask_for_too_much_of_a_gpu(tmp_path, monkeypatch, settings, way):
    """The first way is the cheapest: not to say what proa would choose itself, or less of what was said."""
    gib = {"context_length": 9 if "kv_cache_dtype" not in settings else 9.9}.get(next(iter(settings)), 12)
    machine = Machine(64 * GIB, 1.0, int(gib * GIB), int(24 * GIB))
    monkeypatch.setattr("proa.plan.hardware.probe", lambda *_, **__: machine)
    path = write_config(tmp_path, KIMI_K2 | {"num_hidden_layers": 3})
    given = EngineConfig(model_path=str(path), to_engine="", from_engine="", device="auto", **settings)
    assert not plan_memory(read_sizes(path), machine, given).fits
    ways = ways_to_fit(given)
    assert ways[0].startswith(way) and 1 <= len(ways) <= 3, ways
