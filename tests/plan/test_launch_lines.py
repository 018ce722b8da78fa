"""The seeds' launch lines at Kimi K2's true size: what an engine plans on machines like those they are for."""

from __future__ import annotations

import pytest
from tests.cli.test_launch_server import CODERAI_LINE, KIMI_K27_LINE, KIMI_THINKING_LINE
from tests.plan.models import KIMI_K2, write_config

from proa.cli.flags import by_owner
from proa.cli.sglang_flags import parse
from proa.device.select import Gpu
from proa.engine.config import EngineConfig
from proa.engine.solve import solve
from proa.plan.model_sizes import read_sizes

GIB = 2**30


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    return read_sizes(write_config(tmp_path_factory.mktemp("k2") / "model", KIMI_K2))


def plan(line, sizes, vram_gib, ram_gib):
    values = {**by_owner(parse(line.split()).values, "engine"), "model_path": "", "num_threads": 24}
    config = EngineConfig(to_engine="", from_engine="", **values)
    return solve(config, sizes, Gpu(0, "GPU", int((vram_gib - 1) * GIB), vram_gib * GIB), ram_gib * GIB)


def test_k27_on_96_gib_beside_768_of_ram_gets_all_it_asks_for(sizes):
    found = plan(KIMI_K27_LINE, sizes, 96, 740)
    assert found.kv.num_tokens == 327680 and found.kv.max_model_len == 163840
    assert found.notes["gpu_experts"] == "480 of 23040, auto" and found.placed.moves == 16
    assert found.placed.stream_all and found.placed.stream_from == 400
    assert found.config.chunked_prefill_size == 16384


def test_lines_of_larger_machines_get_what_fits(sizes):
    """200 experts a layer for eight GPUs, here one of 48 GiB; and a line that leaves almost all open."""
    found = plan(KIMI_THINKING_LINE, sizes, 48, 1900)
    assert found.kv.num_tokens == 36992
    assert "12000 asked for" in found.notes["gpu_experts"] and 300 < found.placed.on_gpu.sum() < 900
    found = plan(CODERAI_LINE, sizes, 96, 740)
    assert found.kv.max_model_len == 4096 and found.placed.on_gpu.sum() > 2000
