"""`proa convert`: the files it writes, and that no way of stopping it changes them."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.unit.convert_cases import (
    DIMENSIONS,
    HIDDEN,
    INTERMEDIATE,
    LINEARS,
    NUM_EXPERTS,
    NUM_LAYERS,
    contents,
    convert_in_process,
    write_model,
)

import proa.convert.experts as experts_module
from proa.convert.experts import Conversion
from proa.convert.random_model import RandomDimensions
from proa.convert.verify import verify
from proa.core.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from proa.models import open_experts
from proa.weights.checkpoint import Checkpoint
from proa.weights.converted_format import METHODS
from proa.weights.linear import read_linear
from proa.weights.progress import LoadStatus
from proa.weights.quantize import dequantize, quantize


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("convert") / "model")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    """What an uninterrupted conversion to AMXINT4 writes."""
    output = tmp_path_factory.mktemp("whole") / "out"
    Conversion(model, "AMXINT4", output, num_threads=2).run()
    return output


def linear_names(layer: int):
    for expert in range(NUM_EXPERTS):
        for name, shape in (
            ("gate_proj", (INTERMEDIATE, HIDDEN)),
            ("up_proj", (INTERMEDIATE, HIDDEN)),
            ("down_proj", (HIDDEN, INTERMEDIATE)),
        ):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{name}", shape


@pytest.mark.parametrize("method", METHODS)
def test_the_files_hold_what_numpy_quantizes(model, tmp_path, method):
    """Read with the safetensors package and nothing of ours."""
    output = tmp_path / "out"
    converted = Conversion(model, method, output).run()
    checkpoint = Checkpoint.open(model)
    for layer in range(NUM_LAYERS):
        path = output / f"experts-layer-{layer:05d}.safetensors"
        squared_error = squared_norm = largest = 0.0
        with safe_open(path, "np" if method == "AMXINT8" else "pt") as file:
            names = set(file.keys())
            origin = json.loads(file.metadata()["origin"])
            assert (origin["method"], origin["format"], origin["num_experts"]) == (method, METHODS[method], NUM_EXPERTS)
            assert set(json.loads(file.metadata()["xxh64"])) == names
        ours = Checkpoint(output, {}, checkpoint.quantization, [experts_module.SafetensorsFile.open(path)])
        for name, shape in linear_names(layer):
            source = dequantize(read_linear(checkpoint, name, shape))
            expected = quantize(source, METHODS[method])
            found = read_linear(ours, name, shape)
            assert found.format == expected.format
            assert found.data.tobytes() == expected.data.tobytes()
            assert (found.scales is None) or found.scales.tobytes() == expected.scales.tobytes()
            difference = (source - dequantize(expected)).astype(np.float64)
            squared_error += np.square(difference).sum()
            squared_norm += np.square(source, dtype=np.float64).sum()
            largest = max(largest, np.abs(difference).max())
        record = converted.manifest.layers[layer]
        # Printed with seven significant digits.
        assert record.relative_error == pytest.approx(np.sqrt(squared_error / squared_norm), rel=1e-6)
        assert record.max_error == pytest.approx(largest, rel=1e-6)
    assert verify(Conversion(model, method, output)) > 0


def test_bytes_do_not_depend_on_threads(model, whole, tmp_path):
    for threads in (1, 7):
        Conversion(model, "AMXINT4", tmp_path / str(threads), num_threads=threads).run()
        assert contents(tmp_path / str(threads)) == contents(whole)


def test_killed_anywhere_it_resumes_to_the_same_bytes(model, whole, tmp_path):
    output = tmp_path / "out"
    per_layer = LINEARS // NUM_LAYERS
    layers = 0
    for _ in range(4):
        nth = random.Random(layers).randint(1, per_layer * 2)
        kill = "os.kill(os.getpid(), signal.SIGKILL)"
        assert convert_in_process(model, "AMXINT4", output, nth=nth, body=kill).returncode == -9
        layers += (nth - 1) // per_layer  # a layer is done before the next begins
        assert len(list(output.glob("experts-*.safetensors"))) == layers < NUM_LAYERS
        assert not (output / "proa_experts.json").exists()
        assert len(list(output.glob(".*.partial"))) == 1
    assert layers > 0
    assert Conversion(model, "AMXINT4", output).run().kept == layers
    assert contents(output) == contents(whole)
    assert Conversion(model, "AMXINT4", output).run().kept == NUM_LAYERS
    assert contents(output) == contents(whole)


def test_ctrl_c_leaves_whole_files_and_says_how_to_go_on(model, whole, tmp_path):
    output = tmp_path / "out"
    result = convert_in_process(
        model, "AMXINT4", output, nth=LINEARS // NUM_LAYERS + 2, body="os.kill(os.getpid(), signal.SIGINT)"
    )
    assert result.returncode == 130, result.stderr
    assert "interrupted" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in output.iterdir()] == ["experts-layer-00000.safetensors"]
    assert Conversion(model, "AMXINT4", output).run().kept == 1
    assert contents(output) == contents(whole)


def test_a_file_limit_ends_like_a_full_disk(model, whole, tmp_path):
    output = tmp_path / "out"
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    result = convert_in_process(model, "AMXINT4", output, setup=limit)
    assert result.returncode == 1, result.stderr
    assert "0 of 4 layers are done" in result.stderr and "Traceback" not in result.stderr
    assert list(output.iterdir()) == []
    Conversion(model, "AMXINT4", output).run()
    assert contents(output) == contents(whole)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_full_disk_leaves_a_state_that_resumes(model, whole, tmp_path, monkeypatch, call, allowed):
    output = tmp_path / "out"
    real, count = getattr(os, call), 0

    def fails_later(*arguments):
        nonlocal count
        count += 1
        if count > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, fails_later)
    with pytest.raises(StorageError, match=r"No space left on device.*run the same command again"):
        Conversion(model, "AMXINT4", output).run()
    monkeypatch.undo()
    # A manifest that could not be made durable may lie there unfinished; weights never do.
    assert not list(output.glob(".experts-*"))
    Conversion(model, "AMXINT4", output).run()
    assert contents(output) == contents(whole)


def test_space_is_checked_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(StorageError, match=r"GB free for what is left"):
        Conversion(model, "AMXINT4", tmp_path / "out").run()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "header"])
def test_a_damaged_file_is_converted_again(model, whole, tmp_path, caplog, damage):
    output = shutil.copytree(whole, tmp_path / "out")
    path = output / "experts-layer-00002.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    elif damage == "header":
        data[:8] = (1 << 40).to_bytes(8, "little")
    else:
        del data[0 if damage == "empty" else -100 :]
    path.write_bytes(data)
    assert Conversion(model, "AMXINT4", output).run().kept == NUM_LAYERS - 1
    assert "experts-layer-00002.safetensors: not whole" in caplog.text
    assert contents(output) == contents(whole)


def test_other_options_and_other_sources_are_refused(model, whole, tmp_path):
    output = shutil.copytree(whole, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"method 'AMXINT8'.*got.*method 'AMXINT4'"):
        Conversion(model, "AMXINT8", output).run()
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(output / "proa_experts.json", alone)
    with pytest.raises(ConfigError, match=r"proa_experts.json.*method 'AMXINT8'.*got.*method 'AMXINT4'"):
        Conversion(model, "AMXINT8", alone).run()
    (output / "proa_experts.json").unlink()  # an unfinished conversion tells as much
    with pytest.raises(ConfigError, match=r"method 'AMXINT8'.*got.*method 'AMXINT4'"):
        Conversion(model, "AMXINT8", output).run()
    changed = shutil.copytree(model, tmp_path / "model")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    with pytest.raises(ConfigError, match=r"experts-layer-00000.*model '[0-9a-f]{32}'"):
        Conversion(changed, "AMXINT4", output).run()
    other = write_model(tmp_path / "other" / "model", seed=1)
    with pytest.raises(ConfigError, match="routers"):
        Conversion(other, "AMXINT4", output).run()
    assert {n: b for n, b in contents(whole).items() if n != "proa_experts.json"} == contents(output)


@pytest.mark.parametrize("origin", [None, '{"layout": "proa-experts-2"}', "none"])
def test_files_of_a_newer_proa_or_of_others_are_left_alone(model, tmp_path, origin):
    """An unfinished conversion: its files have no manifest beside them."""
    path = tmp_path / "out" / "experts-layer-00001.safetensors"
    path.parent.mkdir()
    save_file({"x": torch.zeros(4)}, path, None if origin is None else {"origin": origin})
    before = contents(path.parent)
    with pytest.raises(ConfigError, match=r"experts-layer-00001.*expected experts converted by this proa, got others"):
        Conversion(model, "AMXINT4", path.parent).run()
    assert contents(path.parent) == before


def test_a_directory_with_something_else_is_refused(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for directory in (tmp_path, model):
        before = contents(directory) if directory == model else None
        with pytest.raises(ConfigError, match="a new directory"):
            Conversion(model, "AMXINT4", directory).run()
        assert before is None or contents(directory) == before
    with pytest.raises(StorageError, match="File exists"):
        Conversion(model, "AMXINT4", tmp_path / "notes.txt").run()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_conversions_into_one_directory(model, tmp_path, monkeypatch):
    output = tmp_path / "out"
    second: list[ConfigError] = []

    def check_space(self, _needed):
        with pytest.raises(ConfigError, match="in use") as caught:
            Conversion(model, "AMXINT4", output).run()
        second.append(caught.value)

    monkeypatch.setattr(Conversion, "_check_space", check_space)
    Conversion(model, "AMXINT4", output).run()
    assert len(second) == 1


def test_weights_that_cannot_be_quantized_name_their_tensor(tmp_path):
    broken = write_model(tmp_path / "model")
    path = next(broken.glob("*.safetensors"))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    file = experts_module.SafetensorsFile.open(path)
    data = bytearray(path.read_bytes())
    begin = file.entries[name].begin
    data[begin + 8 : begin + 10] = b"\x80\x7f"  # inf in bf16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj.*finite weights"):
        Conversion(broken, "AMXINT8", tmp_path / "out").run()
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["experts-layer-00000.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "INT3"}, ConfigError, "AMXINT4, AMXINT8, BF16, FP8"),
        ({"num_threads": 0}, ConfigError, "at least 1"),
        ({"model": "/nowhere"}, CheckpointError, "no such directory"),
        ({"experts": "/nowhere.gguf"}, CheckpointError, "nowhere"),
    ],
)
def test_what_is_asked_for_is_checked_first(model, tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        Conversion(**{"model": model, "method": "BF16", "output": tmp_path / "out"} | arguments)
    assert not (tmp_path / "out").exists()


def test_a_width_the_method_lacks_is_said_at_once(tmp_path):
    dimensions = experts_module.replace(DIMENSIONS, moe_intermediate_size=40)
    narrow = write_model(tmp_path / "model", dimensions=dimensions)
    with pytest.raises(UnsupportedError, match=r"down_proj.*multiple of 32"):
        Conversion(narrow, "AMXINT4", tmp_path / "out")
    Conversion(narrow, "FP8", tmp_path / "out").run()


def test_verify_finds_what_no_checksum_does(model, whole, tmp_path, monkeypatch):
    output = tmp_path / "out"
    requantize = experts_module.requantize

    def wrong(linear, to, where):
        converted, error = requantize(linear, to, where)
        if where == "model.layers.2.mlp.experts.0.up_proj":
            converted.data[0, 0] ^= 1
        return converted, error

    monkeypatch.setattr(experts_module, "requantize", wrong)
    Conversion(model, "AMXINT4", output).run()
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.0\.up_proj.*the bytes converting it gives"):
        verify(Conversion(model, "AMXINT4", output))


def test_progress_counts_the_source(model, tmp_path):
    states: list[LoadStatus] = []
    Conversion(model, "BF16", tmp_path / "out", progress=states.append).run()
    last = states[-1]
    source_bytes = NUM_LAYERS * NUM_EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2
    assert (last.stage, last.done_bytes, last.total_bytes) == ("converting", source_bytes, source_bytes)


def test_memory_stays_below_two_layers(tmp_path):
    """Anonymous memory of the process; mapped files are page cache and give way."""
    dimensions = RandomDimensions(1024, 1024, 6, 8, 2, 4, 2, 16, max_positions=256)
    large = write_model(tmp_path / "model", dimensions=dimensions)
    layer_bytes = 8 * 3 * 1024 * 1024 * 2
    peak = """
def sample():
    global base, peak
    import time
    anonymous = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
    base = peak = anonymous()
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)
import proa.convert.verify, atexit
threading.Thread(target=sample, daemon=True).start()
atexit.register(lambda: print("growth", peak - base))
"""
    result = convert_in_process(large, "FP8", tmp_path / "out", setup=f"exec({peak!r}, globals())")
    assert result.returncode == 0, result.stderr
    growth = int(result.stdout.split("growth")[1])
    assert 0 < growth < 2 * layer_bytes
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) > 2.5 * layer_bytes


def test_biases_of_experts_are_kept(tmp_path):
    biased = write_model(tmp_path / "model")
    names = [f"{name}.bias" for layer in range(NUM_LAYERS) for name, _ in linear_names(layer)]
    rng = np.random.default_rng(5)
    biases = {n: rng.standard_normal(HIDDEN if "down" in n else INTERMEDIATE, np.float32) for n in names}
    path = next(biased.glob("*.safetensors"))
    tensors = load_file(path) | {name: torch.from_numpy(bias) for name, bias in biases.items()}
    save_file(tensors, path)
    index = json.loads((biased / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(names, path.name)
    (biased / "model.safetensors.index.json").write_text(json.dumps(index))
    Conversion(biased, "BF16", tmp_path / "out").run()
    checkpoint = Checkpoint.open(biased)
    experts = open_experts(checkpoint, tmp_path / "out")
    for layer in range(NUM_LAYERS):
        for name, shape in linear_names(layer):
            found = experts.linear(name, shape)
            assert np.array_equal(found.bias, biases[f"{name}.bias"])
            assert found.data.tobytes() == checkpoint.tensor(f"{name}.weight").data.tobytes()
    assert verify(Conversion(biased, "BF16", tmp_path / "out")) > 0
