"""Checkpoint directories: what opens, and the typed error for everything that must not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from proa.core.errors import CheckpointError, UnsupportedError
from proa.weights.checkpoint import Checkpoint
from proa.weights.quantization import SUPPORTED_QUANTIZATION

INDEX = "model.safetensors.index.json"

INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def write_config(directory: Path, config: Any = None) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral"} if config is None else config))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(4, np.float32)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    assert sorted(checkpoint.names) == ["a", "b"]
    assert "a" in checkpoint
    assert "c" not in checkpoint
    assert checkpoint.total_bytes == 24 + 32
    tensor = checkpoint.tensor("a")
    assert (tensor.name, tensor.dtype, tensor.shape) == ("a", "F32", (2, 3))
    assert tensor.data.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.config == {"model_type": "mixtral"}
    assert checkpoint.generation_config == {}
    with pytest.raises(CheckpointError, match="'c'"):
        checkpoint.tensor("c")


def test_sharded(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert sorted(checkpoint.names) == ["a", "b"]
    assert checkpoint.tensor("b").data.tolist() == [0, 0, 0, 0]


def test_shards_may_be_symbolic_links_like_in_a_hub_cache(sharded: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (sharded / "one.safetensors").rename(blob)
    (sharded / "one.safetensors").symlink_to(blob)
    assert "a" in Checkpoint.open(sharded)


def test_wrapper_prefix_is_resolved(tmp_path: Path) -> None:
    write_config(tmp_path)
    names = ["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x"]
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.names) == ["lm_head.weight", "model.norm.weight", "vision_tower.x"]
    assert checkpoint.tensor("model.norm.weight").data.tolist() == [1, 1]
    assert "language_model.lm_head.weight" in checkpoint.where("lm_head.weight")


def test_name_with_and_without_prefix_is_ambiguous(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({name: np.ones(2) for name in ("x", "language_model.x")}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="one file"):
        Checkpoint.open(tmp_path)


def test_missing_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none", "moonshotai/Kimi-K2-Instruct"):
        with pytest.raises(CheckpointError, match="downloads nothing"):
            Checkpoint.open(path)


def test_path_that_is_a_file(single: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint directory"):
        Checkpoint.open(single / "model.safetensors")


def test_missing_config(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(single)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a": Infinity}'])
def test_config_that_is_no_json_object(single: Path, raw: bytes) -> None:
    (single / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(single)


def test_config_of_absurd_size(single: Path) -> None:
    with (single / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading it would exhaust memory
    with pytest.raises(CheckpointError, match="bytes"):
        Checkpoint.open(single)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_config_that_is_a_device_or_a_pipe(single: Path, name: str) -> None:
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to("/dev/zero")  # reading it would exhaust memory
    with pytest.raises(CheckpointError, match="regular file"):
        _ = Checkpoint.open(single).generation_config
    (single / name).unlink()
    os.mkfifo(single / name)  # reading it would block
    with pytest.raises(CheckpointError, match="regular file"):
        _ = Checkpoint.open(single).generation_config


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "\ud800"])
def test_unprintable_name_in_the_index(sharded: Path, name: str) -> None:
    write_index(sharded, {name: "one.safetensors"})
    with pytest.raises(CheckpointError, match="printable"):
        Checkpoint.open(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "x\0.safetensors",
        "\ud800.safetensors",
        5,
        None,
    ],
)
def test_shard_path_must_stay_in_the_directory(sharded: Path, shard: Any) -> None:
    # The file the path leads to exists, so only the guard can refuse it.
    save_file({"b": np.zeros(4, np.float32)}, sharded.parent / "x.safetensors")
    write_index(sharded, {"a": "one.safetensors", "b": shard})
    with pytest.raises(CheckpointError, match="plain file name"):
        Checkpoint.open(sharded)


def test_shard_must_be_safetensors(sharded: Path) -> None:
    write_index(sharded, {"a": "pytorch_model.bin"})
    with pytest.raises(CheckpointError, match="safetensors"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "one.safetensors"])
def test_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint.open(sharded)


def test_index_with_duplicate_names(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(CheckpointError, match="duplicate"):
        Checkpoint.open(sharded)


def test_listed_tensor_that_the_shard_lacks(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two.safetensors: c"):
        Checkpoint.open(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    save_file({"b": np.zeros(4, np.float32), "a": np.ones(2)}, sharded / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"a in .*one.safetensors too"):
        Checkpoint.open(sharded)


def test_truncated_shard_names_the_file(sharded: Path) -> None:
    path = sharded / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.pkl", "model.ckpt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(CheckpointError, match="never opened") as caught:
        Checkpoint.open(tmp_path)
    assert name in str(caught.value)


def test_directory_without_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)


def test_code_in_the_directory_never_runs(single: Path) -> None:
    canary = single / "canary"
    code = f"open({str(canary)!r}, 'w')"
    for name in ("modeling_x.py", "configuration_x.py", "__init__.py", "sitecustomize.py"):
        (single / name).write_text(code)
    (single / "evil.pth").write_text(f"import os; {code}")
    write_config(single, {"model_type": "mixtral", "auto_map": {"AutoConfig": "configuration_x.X"}})
    assert "a" in Checkpoint.open(single)
    assert not canary.exists()


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    copy["config_groups"]["group_0"]["weights"].update(weights)
    return copy


def activations(config: dict[str, Any], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    copy["config_groups"]["group_0"]["input_activations"] = value
    return copy


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


CHANNEL = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "a": CHANNEL["config_groups"]["group_0"] | {"format": "float-quantized"},
        "b": INT4["config_groups"]["group_0"] | {"format": "pack-quantized"},
    },
}


@pytest.mark.parametrize(
    ("config", "formats"),
    [
        (None, None),
        (INT4, {"int4_g32", "int4_g32_f16"}),
        (changed(INT4, group_size=128), {"int4_g128", "int4_g128_f16"}),
        (activations(INT4, {"num_bits": 8, "dynamic": True}), {"int4_g32", "int4_g32_f16"}),
        (FP8, {"fp8_block128"}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"fp8_block128"}),
        ({**FP8, "expert_dtype": "fp4"}, {"fp8_block128", "mxfp4"}),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, {"mxfp8"}),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, {"mxfp8"}),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, {"mxfp4"}),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"nvfp4"}),
        (GPTQ, {"int4_g64", "int4_g64_f16"}),
        (CHANNEL, {"fp8_channel"}),
        (MIXED, {"fp8_channel", "int4_g32", "int4_g32_f16"}),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            {"fp8_block128"},
        ),
        (compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32), {"mxfp8"}),
        (compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), {"mxfp4"}),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), {"nvfp4"}),
    ],
)
def test_supported_quantization(single: Path, config: Any, formats: set[str] | None) -> None:
    write_config(single, {"quantization_config": config})
    assert Checkpoint.open(single).quantization.formats == formats
    write_config(single, {"text_config": {"quantization_config": config}})
    assert Checkpoint.open(single).quantization.formats == formats


def test_expert_dtype_may_stand_beside_quantization_config(single: Path) -> None:
    write_config(single, {"expert_dtype": "fp4", "quantization_config": FP8})
    assert Checkpoint.open(single).quantization.formats == {"fp8_block128", "mxfp4"}


def test_gptq_says_how_it_stores_the_zero_point(single: Path) -> None:
    for name, zero in (("gptq", 7), ("gptq_v2", 8), (None, None)):
        write_config(single, {"quantization_config": {**GPTQ, "checkpoint_format": name}})
        assert Checkpoint.open(single).quantization.gptq_zero == zero


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {**GPTQ, "desc_act": True},
        {**GPTQ, "sym": False},
        {**GPTQ, "bits": 8},
        {**GPTQ, "group_size": -1},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
        {**FP8, "expert_dtype": "fp6"},
        {"quant_method": "awq"},
        {},
        {"quant_method": ["fp8"]},
        {"quant_method": "fp8"},
        {**FP8, "weight_block_size": [1, 64]},
        {**FP8, "fmt": "e5m2"},
        {**INT4, "format": "float-quantized"},
        changed(INT4, num_bits=8),
        changed(INT4, group_size=256),
        changed(INT4, group_size=[32]),
        {**INT4, "format": ["pack-quantized"]},
        activations(INT4, {"num_bits": 8, "dynamic": False}),
        activations(INT4, "int8"),
        changed(INT4, symmetric=False),
        changed(INT4, strategy="channel"),
        changed(INT4, actorder="group"),
        changed(INT4, type="float"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_unknown_quantization_lists_what_is_supported(single: Path, config: Any, nested: bool) -> None:
    quantized = {"quantization_config": config}
    write_config(single, {"text_config": quantized} if nested else quantized)
    with pytest.raises(UnsupportedError) as caught:
        Checkpoint.open(single)
    assert all(name in str(caught.value) for name in SUPPORTED_QUANTIZATION)


@pytest.mark.parametrize("config", ["fp8", [1], {**INT4, "config_groups": []}, {**INT4, "config_groups": {"g": 1}}])
def test_quantization_of_the_wrong_type(single: Path, config: Any) -> None:
    write_config(single, {"quantization_config": config})
    with pytest.raises(CheckpointError, match="quantization_config"):
        Checkpoint.open(single)


def test_a_path_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        Checkpoint.open(tmp_path / ("x" * 5000))
