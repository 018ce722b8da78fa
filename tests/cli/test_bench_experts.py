from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from proa.cli.bench_experts_core import ExpertBench, fit
from proa.cli.bench_experts_data import make_inputs, random_experts
from proa.cli.bench_experts_peers import TorchSide
from proa.cli.bench_experts_sides import ProaSide, Setup
from proa.cli.bench_experts_spec import METHODS, MODELS, make_spec, parse_tokens
from proa.cli.main import app
from proa.core.errors import ConfigError
from proa.gguf.types import GGML_TYPES
from proa.native import _C
from proa.native.runtime import CACHE_MULTIPLE, CpuRuntime
from proa.weights.gguf_blocks import dequantize as dequantize_blocks
from proa.weights.quantize import dequantize

runner = CliRunner()
TINY = {"hidden": 64, "intermediate": 96, "experts": 5, "top_k": 3}
TINY_FLAGS = ["--hidden", "64", "--intermediate", "96", "--experts", "5", "--top-k", "3", "--seconds", "0.02"]
CELL_KEYS = {
    "tokens", "kernel", "calls", "ms", "cpu_ms", "distinct_experts", "gb_per_s", "read_gb_per_s", "bandwidth_fraction",
    "cpu_bandwidth_fraction",
    "tflops", "matrix_tflops", "matrix_fraction", "peer",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr("proa.native.runtime.MAX_PROBE_MIB", 32)
    monkeypatch.setattr("proa.cli.bench_experts_limits.GEMM", (64, 64, 64))
    monkeypatch.setattr("proa.cli.bench_experts_core.MAX_LAYERS", 4)


def tiny(method="RAWINT4", **changes):
    return make_spec(**{"method": method, "tokens": (1,), **TINY, **changes})


def whole_groups(method, **changes):
    """Dimensions that every format can have."""
    return tiny(method, **{"hidden": 256, "intermediate": 512, **changes})


def values_of(linear):
    if linear.layout == "rows":
        return dequantize(linear)
    return dequantize_blocks(next(t for t in GGML_TYPES.values() if t.name.lower() == linear.format), linear.data)


@pytest.mark.parametrize(
    ("method", "model", "megabytes"),
    [
        ("RAWINT4", "kimi-k2", 24.772608),
        ("FP8", "deepseek-v3", 44.040192 + 3 * 16 * 56 * 4e-6),
        ("BF16", "qwen3-30b", 9.437184),
        ("F32", "qwen3-30b", 18.874368),
        ("FP8", "gpt-oss-120b", 24.8832 + 3 * 23 * 23 * 4e-6),
    ],
)
def test_bytes_are_the_checkpoints(method, model, megabytes):
    assert make_spec(method=method, model=model, tokens=(1,)).bytes_per_expert == round(megabytes * 1e6)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_what_the_native_layer_packs_less_its_padding(method):
    spec = tiny(method, hidden=1024, intermediate=512)
    raw = random_experts(spec)[0]
    assert spec.bytes_per_expert == raw.gate.nbytes + raw.up.nbytes + raw.down.nbytes
    if not _C.kernel_report(spec.method.format, 512, 1024):
        pytest.skip("no kernel yet")
    with CpuRuntime(1) as runtime:
        layer = _C.ExpertLayer(_C.ExpertWorkspace(runtime.pool, 1), 1, 1024, 512, spec.method.format)
        panels = (512 + 512 + 1024) // 16  # each may end in padding
        largest = spec.bytes_per_expert + 64 * panels
        if spec.method.layout == "ggml":  # six-bit scales are widened to bytes
            largest += spec.bytes_per_expert // 20
        assert spec.bytes_per_expert <= layer.bytes_per_expert <= largest


def test_flops_count_two_per_weight_and_chosen_expert():
    assert make_spec(method="BF16", model="kimi-k2", tokens=(1,)).flops(10) == 10 * 8 * 3 * 7168 * 2048 * 2


def test_flags_win_over_the_model():
    spec = make_spec(method="int4_g32", model="gpt-oss-120b", tokens=(1,), experts=32)
    assert spec.method.name == "RAWINT4"
    assert (spec.dims.hidden, spec.dims.experts, spec.dims.top_k) == (2880, 32, MODELS["gpt-oss-120b"].top_k)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 80}, "--hidden"),
        ({"intermediate": 80}, "--intermediate"),
        ({"hidden": 0}, "--hidden"),
        ({"intermediate": -32}, "--intermediate"),
        ({"hidden": None}, "--hidden"),
        ({"experts": 0}, "--experts"),
        ({"top_k": 6}, "--top-k"),
        ({"top_k": 0}, "--top-k"),
        ({"method": "INT3"}, "--method"),
        ({"model": "llama"}, "--model"),
        ({"peer": "vllm"}, "--peer"),
        ({"seconds": 0.0}, "--seconds"),
        ({"seconds": float("nan")}, "--seconds"),
        ({"tokens": ()}, "--tokens"),
    ],
)
def test_nonsense_is_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=rf"\[{named}\] expected "):
        tiny(**changes)


def test_only_int4_needs_whole_groups():
    assert tiny("FP8", hidden=81).dims.hidden == tiny("BF16", hidden=81).dims.hidden == 81


def test_tokens_are_a_list():
    assert parse_tokens("1, 4,1024") == (1, 4, 1024)
    for text in ("", "1,,2", "0", "-1", "1.5", "x", "99999999"):
        with pytest.raises(ConfigError, match="--tokens"):
            parse_tokens(text)


def test_experts_are_as_many_as_fit_in_memory():
    spec = make_spec(method="RAWINT4", model="kimi-k2", tokens=(1,))
    gigabyte = 10**9
    assert fit(spec, 40 * gigabyte, 0) == (spec, 1, [])
    fewer, layers, notes = fit(spec, 10 * gigabyte, 0)
    assert 8 <= fewer.dims.experts < 384
    assert fewer.dims.experts * spec.bytes_per_expert < 6 * gigabyte
    assert layers == 1
    assert len(notes) == 1
    assert f"{fewer.dims.experts} experts instead of 384" in notes[0]
    beside_torch = make_spec(method="RAWINT4", model="kimi-k2", tokens=(1,), peer="torch")
    assert fit(beside_torch, 10 * gigabyte, 0)[0].dims.experts < fewer.dims.experts / 4
    with pytest.raises(ConfigError, match="memory"):
        fit(spec, gigabyte // 10, 0)


def test_small_layers_take_turns_so_that_no_cache_holds_them():
    spec = make_spec(method="RAWINT4", model="qwen3-30b", tokens=(1,))
    layer_bytes = 128 * spec.bytes_per_expert
    assert fit(spec, 10**12, layer_bytes)[1] == CACHE_MULTIPLE
    _, layers, notes = fit(spec, 4 * layer_bytes, layer_bytes)
    assert layers == 2 < CACHE_MULTIPLE
    assert "L3" in notes[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [256, 1100])
def test_random_weights_are_valid_and_of_the_size_that_normal_ones_have(method, rows):
    variants = random_experts(whole_groups(method, intermediate=rows // 256 * 256))
    values = [values_of(raw.gate) for raw in variants]
    assert values[0].shape == (rows // 256 * 256, 256)
    spread = np.std(values[0]) * 16
    assert 0.9 < spread < 1.1 if METHODS[method].layout == "rows" else 0.05 < spread < 20
    assert not np.array_equal(values[0], values[1])


def test_routing_is_random_and_distinct_per_token():
    inputs = make_inputs(tiny().dims, 40)
    assert all(len(set(row)) == 3 for routing in inputs.ids for row in routing.tolist())
    assert set(inputs.ids.flat) == set(range(5))
    assert inputs.weights.sum(axis=2) == pytest.approx(1)
    assert inputs.distinct_experts() == 5
    assert make_inputs(tiny().dims, 1).distinct_experts() == 3


def reference(variants, inputs, index):
    """One call in float64, an expert and a token at a time."""
    out = np.zeros(inputs.x.shape)
    for token, (ids, weights) in enumerate(zip(inputs.ids[index], inputs.weights[index], strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            raw = variants[expert % len(variants)]
            gate, up, down = (values_of(linear).astype(np.float64) for linear in (raw.gate, raw.up, raw.down))
            x = inputs.x[token].astype(np.float64)
            g = gate @ x
            out[token] += weight * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side_class", ["proa", "torch"])
def test_both_sides_compute_the_layer(method, side_class):
    spec = whole_groups(method, tokens=(7,))
    if side_class == "proa" and not _C.kernel_report(spec.method.format, 256, 512):
        pytest.skip("no kernel yet")
    setup = Setup(spec, 2, 1, random_experts(spec))
    inputs = make_inputs(spec.dims, 7)
    with CpuRuntime(1) as runtime:
        side = ProaSide(setup, runtime) if side_class == "proa" else TorchSide(setup)
        side.prepare(inputs)
        for index in (0, 1, 5):
            side.call(index)
            expected = reference(setup.variants, inputs, index)
            # bf16 keeps 8 bits and int8 activations 7: each of a handful of roundings is below 2^-7 in relative norm.
            assert np.linalg.norm(side.output() - expected) < 0.03 * np.linalg.norm(expected)


def test_json_has_what_the_numbers_follow_from():
    result = runner.invoke(app, ["bench", "experts", *TINY_FLAGS, "--tokens", "1,3", "--peer", "torch", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["machine"]["model_name"]
    assert report["layer"]["method"] == "RAWINT4"
    assert {key: report["layer"][key] for key in TINY} == TINY
    assert [cell["tokens"] for cell in report["results"]] == [1, 3]
    for cell in report["results"]:
        assert set(cell) == CELL_KEYS
        assert "int4_g32" in cell["kernel"]
        seconds = cell["ms"] / 1e3
        size = cell["distinct_experts"] * report["layer"]["bytes_per_expert"]
        assert cell["gb_per_s"] == pytest.approx(size / seconds / 1e9)
        assert cell["bandwidth_fraction"] == pytest.approx(cell["gb_per_s"] / cell["read_gb_per_s"])
        assert cell["tflops"] == pytest.approx(cell["tokens"] * 3 * 3 * 64 * 96 * 2 / seconds / 1e12)
        assert cell["matrix_fraction"] == pytest.approx(cell["tflops"] / max(cell["matrix_tflops"].values()))
        assert cell["calls"] >= 4
        peer = cell["peer"]
        assert peer["name"] == "torch"
        assert peer["speedup"] == pytest.approx(peer["ms"] / cell["ms"])
        assert 0 < peer["difference"] < 0.05
    assert report["results"][0]["distinct_experts"] == 3


def test_table_and_refusal_on_the_command_line():
    result = runner.invoke(app, ["bench", "experts", *TINY_FLAGS, "--tokens", "2", "--method", "BF16"])
    assert result.exit_code == 0, result.output
    assert "BF16 (bf16), 64 x 96, 3 of 5 experts" in result.stdout
    assert "of read" in result.stdout
    assert "speed-up" not in result.stdout
    assert isinstance(runner.invoke(app, ["bench", "experts", "--hidden", "80"]).exception, ConfigError)


def test_a_missing_peer_is_an_error_before_any_packing(monkeypatch):
    monkeypatch.setitem(sys.modules, "kt_kernel", None)
    monkeypatch.setattr("proa.cli.bench_experts_core.random_experts", None)
    monkeypatch.setattr("proa.cli.bench_experts_peers._divert_native_stdout", lambda: None)
    with pytest.raises(ConfigError, match="importable kt_kernel"):
        ExpertBench(tiny(peer="kt-kernel"))


def test_a_peer_that_does_other_work_is_noticed(monkeypatch):
    monkeypatch.setattr(TorchSide, "output", lambda self: self._out.float().numpy() * 2)
    with ExpertBench(tiny(peer="torch", seconds=0.01)) as bench:
        (cell,) = bench.cells()
        assert cell.peer.difference == pytest.approx(1, abs=0.1)
        assert "not the same work" in bench.notes[-1]


def test_the_core_runs_without_terminal_libraries_and_torch(tmp_path):
    program = (
        "import sys\n"
        "for name in ('typer', 'rich', 'pydantic', 'msgspec', 'torch', 'httpx', 'fastapi'): sys.modules[name] = None\n"
        "from proa.cli.bench_experts_core import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, *TINY_FLAGS, "--tokens", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["results"][0]["matrix_fraction"] is None
    assert any("torch is missing" in note for note in report["notes"])
    refused = subprocess.run([*command, "--peer", "torch"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "importable torch" in refused.stderr


def test_the_command_line_loads_neither_numpy_nor_the_extension():
    program = (
        "import sys, proa.cli.main\nprint([name for name in ('numpy', 'torch', 'proa.native') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
