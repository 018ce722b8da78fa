from __future__ import annotations

import pytest
from tests.plan.models import KIMI_K2, write_config

from proa.cli.fit import ways_to_fit
from proa.engine.config import EngineConfig
from proa.plan.advice import cheapest_ways
from proa.plan.hardware import GIB, Overrides, probe
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
