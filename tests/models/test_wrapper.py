"""Kimi K2.5's layout: text_config with the quantization inside, names below `language_model.`, a vision tower beside."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from proa.models import load_model
from proa.weights.checkpoint import Checkpoint
from tests.models.conftest import MAX_TOKENS
from tests.models.paging import Pager
from tests.models.variants import VARIANTS, VOCAB


def logits(model):
    ids = torch.arange(40, dtype=torch.int32) % VOCAB
    pager = Pager(model, num_blocks=8)
    return pager.forward([(pager.sequence(len(ids)), ids)])


def test_wrapped_checkpoint_gives_the_bits_of_the_flat_one(make_case, runtime, tmp_path):
    flat = make_case(next(variant for variant in VARIANTS if variant.name == "kimi_int4"))
    tensors = load_file(flat.path / "model.safetensors")
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    wrapped["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.zeros(3, 5)
    wrapped["mm_projector.proj.0.weight"] = torch.zeros(2, 2)
    save_file(wrapped, tmp_path / "model.safetensors")
    config = json.loads((flat.path / "config.json").read_text())
    assert "quantization_config" in config
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config}))
    model = load_model(Checkpoint.open(tmp_path), runtime, max_tokens=MAX_TOKENS, max_positions=256)
    assert torch.equal(logits(model), logits(flat.model))
