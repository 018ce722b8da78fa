"""`proa bench hybrid` on a machine without a GPU: the CPU stands in for it."""

from __future__ import annotations

import json

import pytest
from tests.kernels.fake_cuda import SOURCE, build_fake_driver
from typer.testing import CliRunner

from proa.cli import bench_hybrid_core
from proa.cli.bench_experts_spec import MODELS, ExpertDims, make_spec
from proa.cli.bench_hybrid_core import main, run
from proa.cli.bench_hybrid_spec import HybridSpec, TrunkDims, make_hybrid_spec
from proa.cli.main import app
from proa.core.errors import ConfigError

TRUNK = TrunkDims(6, 2, 32, 32, 16, 8, 16, 64)


def no_compute(spec, device):
    def compute(x, topk, arena, table, out, accumulate):
        if not accumulate:
            out.zero_()

    return compute


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cuda")
    build_fake_driver(directory)
    return str(directory / "libfake_cuda.so")


@pytest.mark.parametrize("hand_over", ["memory", "host_function"])
@pytest.mark.parametrize("gpu_experts", [0, 3])
def test_measures_every_number(library, hand_over, gpu_experts):
    experts = make_spec(
        method="RAWINT4", tokens=(1,), hidden=64, intermediate=64, experts=8, top_k=2, seconds=0.02, threads=1
    )
    spec = HybridSpec(experts, TRUNK, 3, (8, 20), gpu_experts, 0.8, int(gpu_experts > 0), 2, 3, batches=(1, 3))
    result = run(spec, hand_over, lambda line: None, library=library, compute=no_compute)
    json.dumps(result)
    assert [row["tokens"] for row in result["decode"]] == [1, 3]
    assert all(row["faults"] == 0 and row["step_ms"] > 0 for row in result["decode"])
    assert [row["tokens"] for row in result["prefill"]] == [8, 20]
    assert all(row["chunk_s"] > 0 and row["stream_over_copy"] > 0 for row in result["prefill"])
    assert result["model"]["layers"] == 3 and result["machine"]["gpu"] == "none"
    assert result["hand_over"] == hand_over
    assert ("updates" in result) == (gpu_experts > 0)
    if gpu_experts:
        updates = result["updates"]
        assert updates["moved"] > 0 and updates["faults"] == 0
        assert min(updates["followed_hits"]) > max(updates["uniform_hits"])


def test_specs_fit_memory_and_refuse_nonsense():
    assert make_hybrid_spec(model="kimi-k2", layers=8, available=40 * 10**9).layers == 4
    for wrong in (
        {"model": "kimi"},
        {"layers": 0},
        {"gpu_experts": 385},
        {"skew": 1.0},
        {"batches": (1, 17)},
        {"prompts": (0,)},
        {"available": 10**9},
    ):
        with pytest.raises(ConfigError):
            make_hybrid_spec(**{"model": "kimi-k2", "layers": 1, **wrong})
    assert MODELS["kimi-k2"] == ExpertDims(7168, 2048, 384, 8)
    assert make_hybrid_spec(model="kimi-k2", layers=1).layer_bytes == 384 * 24_772_608


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(bench_hybrid_core, "available_bytes", lambda: 10**13)
    assert main(["--layers", "1"]) == 2
    assert "CUDA" in capsys.readouterr().err
    assert main(["--layers", "0"]) == 2


def test_help_names_the_flags():
    text = CliRunner().invoke(app, ["bench", "hybrid", "--help"]).output
    assert "--gpu-experts" in text and "--hand-over" in text
    assert SOURCE.exists()
