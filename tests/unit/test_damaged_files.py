"""Weight files that are cut short after their header was checked, and blocks whose scales are no numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.kernels.ggml_blocks import TYPES, any_blocks, plain_blocks, values_of
from tests.unit.test_gguf_blocks import READABLE

from proa.core.errors import CheckpointError
from proa.gguf.model import GgufModel
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertShape
from proa.weights.gguf_blocks import NATIVE
from proa.weights.gguf_experts import GgufExperts

EXPERTS, WIDTH = 5, 256
PARTS = ("gate", "up", "down")
BLOCKS = [name for name in READABLE if name not in ("F32", "F16", "BF16")]


def write_experts(path: Path, type_name: str, change: Callable[[np.ndarray], None]) -> GgufExperts:
    """One layer whose down projection `[EXPERTS, WIDTH, row bytes]` is changed."""
    rng = np.random.default_rng(len(type_name))
    writer = gguf.GGUFWriter(path, "test")
    for part in PARTS:
        blocks = (plain_blocks if type_name in NATIVE else zeros)(type_name, EXPERTS * WIDTH, WIDTH, rng)
        blocks = blocks.reshape(EXPERTS, WIDTH, -1)
        if part == "down":
            change(blocks)
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = {part: part for part in PARTS}
    return GgufExperts(GgufModel.open(path), {0: "x"}, names, ExpertShape(EXPERTS, WIDTH, WIDTH))


def zeros(type_name: str, rows: int, columns: int, _: np.random.Generator) -> np.ndarray:
    kind = TYPES[type_name]
    return np.zeros((rows, columns // kind.block_elements * kind.block_bytes), np.uint8)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_scale_that_is_no_number_is_refused_wherever_it_stands(name: str, tmp_path: Path) -> None:
    """Random bytes: those that the `gguf` package makes inf or NaN of are refused, and no others.

    Its MXFP4 takes an exponent of 255 for a power of two; the format says NaN.
    """

    def damage(blocks: np.ndarray) -> None:
        blocks[1:] = any_blocks(name, (EXPERTS - 1) * WIDTH, WIDTH, np.random.default_rng(1)).reshape(blocks[1:].shape)
        # Most experts have a bad scale somewhere; the last is one whose rows were all good.
        blocks[4] = blocks[0]
        stored.append(blocks)

    stored: list[np.ndarray] = []
    experts = write_experts(tmp_path / "x.gguf", name, damage)
    for expert in range(EXPERTS):
        blocks = stored[0][expert]
        finite = bool(np.isfinite(values_of(name, blocks)).all())
        if name == "MXFP4":
            finite = not (blocks.reshape(-1, TYPES[name].block_bytes)[:, 0] == 255).any()
        assert finite == (name == "NVFP4" or expert in (0, 4))  # no scale of NVFP4 is inf or NaN
        if finite:
            experts.linear(f"x.{expert}.down", (WIDTH, WIDTH))
            continue
        with pytest.raises(CheckpointError, match=rf"finite scales, got inf or NaN in expert {expert}") as caught:
            experts.linear(f"x.{expert}.down", (WIDTH, WIDTH))
        assert f"{tmp_path / 'x.gguf'}: blk.0.ffn_down_exps.weight" in str(caught.value)


@pytest.mark.parametrize("name", sorted(NATIVE.keys() & set(BLOCKS) - {"MXFP4"}))
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_each_number_of_a_block_is_looked_at(name: str, bits: int, tmp_path: Path) -> None:
    for at in NATIVE[name].halves:

        def damage(blocks: np.ndarray, at: int = at) -> None:
            last = blocks[3].reshape(-1, TYPES[name].block_bytes)[-1]
            last[at : at + 2] = np.array([bits], "<u2").view(np.uint8)

        experts = write_experts(tmp_path / f"{at}.gguf", name, damage)
        with pytest.raises(CheckpointError, match=rf"in expert 3, row {WIDTH - 1}, block"):
            experts.linear("x.3.down", (WIDTH, WIDTH))


def test_a_gguf_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    experts = write_experts(tmp_path / "x.gguf", "Q4_0", lambda blocks: None)
    os.truncate(tmp_path / "x.gguf", (tmp_path / "x.gguf").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"x.gguf: blk.0.ffn_down_exps.weight\] expected bytes up to \d+, got"):
        experts.linear("x.0.down", (WIDTH, WIDTH))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj"])
def test_a_mapped_tensor_of_a_file_cut_short(tmp_path: Path, name: str) -> None:
    """Embeddings and fused experts are used where they are mapped: touching what is gone would be SIGBUS."""
    values = torch.zeros(4, 64, 64) if "experts" in name else torch.zeros(256, 64)
    save_file({name: values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    checkpoint = Checkpoint.open(tmp_path)
    with checkpoint.read_ahead():
        checkpoint.tensor(name)
        os.truncate(tmp_path / "model.safetensors", 8192)
        message = rf"{name}\] expected bytes up to \d+, got a file that ends at 8192"
        for read in (checkpoint.tensor, checkpoint.mapped_tensor):
            with pytest.raises(CheckpointError, match=message):
                read(name)
