"""The converters' writer makes checkpoints that our reader, the safetensors library and transformers accept."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from proa.convert import writer as writer_module
from proa.convert.encoding import FORMATS
from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.convert.writer import CheckpointWriter
from proa.core.errors import CheckpointError, ConfigError
from proa.models.registry import checkpoint_config
from proa.weights.checkpoint import Checkpoint
from proa.weights.formats import ROW_FORMATS
from proa.weights.linear import read_linear
from proa.weights.quantize import dequantize, quantize


def test_shards_index_and_alignment(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    written = []
    values = {f"t{index}": np.full((5, 8), index, np.float32) for index in range(7)}
    with CheckpointWriter(tmp_path, max_shard_bytes=400, on_bytes=written.append) as writer:
        for name, value in values.items():
            writer.add(name, "F32", value)
    assert written == [160] * 7
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)
    ]
    assert not list(tmp_path.glob("*.partial"))
    checkpoint = Checkpoint.open(tmp_path)
    assert all(np.array_equal(checkpoint.tensor(name).data, value) for name, value in values.items())
    assert not checkpoint.tensor("t0").data.flags.owndata  # aligned, so a view
    with safe_open(tmp_path / "model-00001-of-00004.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("t1"), values["t1"])


def test_a_full_header_begins_a_new_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_HEADER_END", 1024)
    monkeypatch.setattr(writer_module, "_HEADER_ROOM", 1016)
    (tmp_path / "config.json").write_text("{}")
    names = [f'quote" and \\ and ü {index} {"x" * 50}' for index in range(40)]
    with CheckpointWriter(tmp_path) as writer:
        for name in names:
            writer.add(name, "I64", np.array([len(name)]))
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.names) == sorted(names)


def test_a_tensor_that_would_lie_misaligned_begins_a_new_shard(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with CheckpointWriter(tmp_path) as writer:
        writer.add("a", "U8", np.arange(3, dtype=np.uint8))
        writer.add("b", "I64", np.array([1 << 40]))
    with safe_open(tmp_path / "model-00002-of-00002.safetensors", "pt") as file:
        assert file.get_tensor("b").tolist() == [1 << 40]
    assert Checkpoint.open(tmp_path).tensor("a").data.tolist() == [0, 1, 2]


def test_a_failed_writer_leaves_no_checkpoint(tmp_path: Path) -> None:
    def fail() -> None:
        with CheckpointWriter(tmp_path) as writer:
            writer.add("a", "F32", np.zeros(3, np.float32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("to", FORMATS)
def test_linears_read_back_as_written(tmp_path: Path, to: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    columns = 160 if ROW_FORMATS[to].ragged else 256
    weight = np.random.default_rng(1).standard_normal((9000, columns), np.float32)
    linear = quantize(weight, to)
    with CheckpointWriter(tmp_path) as writer:
        writer.add_linear("p", linear)
    read = read_linear(Checkpoint.open(tmp_path), "p", (9000, columns))
    assert read.format == to
    assert np.array_equal(dequantize(read), dequantize(linear))
    # The coarsest is e2m1 under a power of two: off by 1 at 7, where the scale of absmax / 3.5 and below may put it.
    assert np.abs(dequantize(read) - weight).max() <= np.abs(weight).max() / 3.5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    vocab = {chr(97 + index): index for index in range(26)}
    content = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": [{"id": 40, "content": "<e>"}]}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "generation_config.json").write_text('{"eos_token_id": 40}')
    return directory


@pytest.mark.parametrize("to", FORMATS)
def test_random_model(tmp_path: Path, tokenizer: Path, to: str) -> None:
    directory = tmp_path / "model"
    write_random_model(directory, DIMENSIONS["tiny"], tokenizer, format=to)
    checkpoint = Checkpoint.open(directory)
    config = checkpoint_config(checkpoint)
    assert (config.vocab_size, config.eos_token_ids, config.moe.num_experts) == (41, (40,), 8)
    assert (directory / "tokenizer.json").read_text() == (tokenizer / "tokenizer.json").read_text()
    for prefix, shape in {
        "lm_head": (41, 128),
        "model.layers.1.self_attn.k_proj": (64, 128),
        "model.layers.0.mlp.experts.7.down_proj": (128, 128),
    }.items():
        assert read_linear(checkpoint, prefix, shape).format == to
    assert read_linear(checkpoint, "model.layers.0.mlp.gate", (8, 128)).format in ("bf16", "f32")
    first, second = (read_linear(checkpoint, f"model.layers.0.mlp.experts.{e}.up_proj").data for e in (0, 1))
    assert np.array_equal(np.roll(first, 1, axis=0), second)


def test_random_model_is_a_model_for_transformers(tmp_path: Path, tokenizer: Path) -> None:
    write_random_model(tmp_path / "m", DIMENSIONS["tiny"], tokenizer, format="f32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


def test_random_model_refuses_bad_arguments(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="empty or missing"):
        write_random_model(tmp_path / "full", DIMENSIONS["tiny"], tokenizer)
    narrow = replace(DIMENSIONS["tiny"], moe_intermediate_size=96)
    with pytest.raises(ConfigError, match="groups of 128"):
        write_random_model(tmp_path / "new", narrow, tokenizer, format="int4_g128")
    with pytest.raises(ConfigError, match="int3"):
        write_random_model(tmp_path / "new", DIMENSIONS["tiny"], tokenizer, format="int3")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        write_random_model(tmp_path / "new", DIMENSIONS["tiny"], tmp_path)
    assert not (tmp_path / "new").exists()


def test_random_model_command_line(tmp_path: Path, tokenizer: Path) -> None:
    command = [sys.executable, "-m", "proa.convert.random_model", str(tmp_path / "m"), "--like", "tiny"]
    options = ["--format", "bf16", "--tokenizer", str(tokenizer)]
    done = subprocess.run([*command, "--layers", "1", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert checkpoint_config(Checkpoint.open(tmp_path / "m")).num_layers == 1
    done = subprocess.run([*command, "--layers", "0", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("[--layers]")
