"""A tiny checkpoint of Kimi K2's kind: MLA, int4 experts, a tokenizer of tiktoken ranks, its context length."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
from tests.plan.models import KIMI_K2

from proa.chat.output.kimi_k2 import MARKERS
from proa.convert.writer import CheckpointWriter
from proa.models.registry import decoder_spec, read_config
from proa.plan.declared import declared_tensors
from proa.weights.quantize import quantize

CONTROL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
NUM_RANKS = 256
END = NUM_RANKS + CONTROL.index("<|im_end|>")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def write_tokenizer(directory: Path) -> None:
    """Single bytes, with Kimi's control tokens behind them."""
    ranks = b"\n".join(base64.b64encode(bytes([value])) + b" %d" % value for value in range(NUM_RANKS))
    (directory / "tiktoken.model").write_bytes(ranks)
    added = {str(NUM_RANKS + i): {"content": name} for i, name in enumerate((*CONTROL, *MARKERS))}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))


def write_kimi(directory: Path, seed: int = 0) -> Path:
    """Random weights: routed experts in int4, everything else in bf16, as Kimi K2 Thinking has them."""
    directory.mkdir(parents=True)
    config = KIMI_K2 | SIZES | {"eos_token_id": END}
    rng = np.random.default_rng(seed)
    with CheckpointWriter(directory) as writer:
        for tensor in declared_tensors(decoder_spec(read_config(config, "config.json"))):
            if len(tensor.shape) == 1:
                values = (
                    np.ones(tensor.shape, np.float32) if "norm" in tensor.name else np.zeros(tensor.shape, np.float32)
                )
                if tensor.name.endswith("e_score_correction_bias"):
                    writer.add(tensor.name, "F32", values)
                else:
                    writer.add(tensor.name, "BF16", quantize(values[None], "bf16").data[0])
                continue
            values = rng.standard_normal(tensor.shape, dtype=np.float32) / np.float32(tensor.shape[1] ** 0.5)
            weight_format = "int4_g32" if tensor.part == "experts" else "bf16"
            writer.add_linear(tensor.name.removesuffix(".weight"), quantize(values, weight_format))
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory
