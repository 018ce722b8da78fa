"""Writes a randomly weighted checkpoint with the layer dimensions of Qwen3-30B-A3B, for speed runs beside llama.cpp.

    python benchmarks/serving/random_model.py OUT_DIR --layers 8 --format int4_g32

The dimensions and the trick (one random expert, rolled: the bytes differ, quantizing is paid once) are those of the
GGUF maker the peers are run with, so both engines read the same amount per layer. The tokenizer is the demo model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from proa.convert.demo_model import ensure_demo_model
from proa.convert.encoding import FORMATS, encode, quantization_config
from proa.convert.writer import CheckpointWriter
from proa.weights.linear import RawLinear

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
STANDARD_DEVIATION = 0.02


def rolled(linear: RawLinear, rows: int) -> RawLinear:
    """`linear` with its output rows moved on by `rows`: other bytes, the same distribution."""
    scales = None if linear.scales is None else np.roll(linear.scales, rows, axis=0)
    return replace(linear, data=np.roll(linear.data, rows, axis=0), scales=scales)


def config(layers: int, vocab_size: int, to: str) -> dict:
    """config.json of the model."""
    values = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    quantization = quantization_config(to, ["re:.*mlp\\.gate$"])
    return values if quantization is None else {**values, "quantization_config": quantization}


def write(directory: Path, layers: int, to: str, vocab_size: int) -> None:
    """Write the weights; every linear but router and embedding in the format `to`."""
    rng = np.random.default_rng(0)

    def random(out_features: int, in_features: int) -> np.ndarray:
        return rng.standard_normal((out_features, in_features), dtype=np.float32) * np.float32(STANDARD_DEVIATION)

    with CheckpointWriter(directory) as writer:

        def ones(name: str, size: int) -> None:
            writer.add(name, "BF16", encode(np.ones((1, size), np.float32), "bf16").data[0])

        writer.add_linear("model.embed_tokens", encode(random(vocab_size, HIDDEN), "bf16"))
        writer.add_linear("lm_head", encode(random(vocab_size, HIDDEN), to))
        ones("model.norm.weight", HIDDEN)
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            ones(f"{prefix}.input_layernorm.weight", HIDDEN)
            ones(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
            for name, shape in (
                ("q_proj", (HEADS * HEAD_DIM, HIDDEN)),
                ("k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
                ("v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
                ("o_proj", (HIDDEN, HEADS * HEAD_DIM)),
            ):
                writer.add_linear(f"{prefix}.self_attn.{name}", encode(random(*shape), to))
            ones(f"{prefix}.self_attn.q_norm.weight", HEAD_DIM)
            ones(f"{prefix}.self_attn.k_norm.weight", HEAD_DIM)
            writer.add_linear(f"{prefix}.mlp.gate", encode(random(EXPERTS, HIDDEN), "bf16"))
            for name, shape in (
                ("gate_proj", (INTERMEDIATE, HIDDEN)),
                ("up_proj", (INTERMEDIATE, HIDDEN)),
                ("down_proj", (HIDDEN, INTERMEDIATE)),
            ):
                linear = encode(random(*shape), to)
                for expert in range(EXPERTS):
                    writer.add_linear(f"{prefix}.mlp.experts.{expert}.{name}", rolled(linear, expert))


def main() -> None:
    """Write the checkpoint directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="48 in the real model")
    parser.add_argument("--format", choices=FORMATS, default="int4_g32")
    arguments = parser.parse_args()
    demo = ensure_demo_model()
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    arguments.directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, arguments.directory / name)
    write(arguments.directory, arguments.layers, arguments.format, vocab_size)
    text = json.dumps(config(arguments.layers, vocab_size, arguments.format), indent=1)
    (arguments.directory / "config.json").write_text(text)


if __name__ == "__main__":
    main()
