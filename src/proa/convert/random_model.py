"""A randomly weighted qwen3_moe checkpoint with the dimensions of a real model, for speed runs.

Speed depends on shapes and formats, not on values. Every linear (attention, experts, output head) is in the format
asked for, so the bytes read per token equal those of a GGUF file of the same bits; embedding, norms and routers are
bf16. Within a layer the experts are one random expert whose rows are rolled: the bytes differ, the quantizing is paid
once.

    python -m proa.convert.random_model --like qwen3-30b --layers 6 --format int4_g32 OUT [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from proa.convert.demo_model import ensure_demo_model
from proa.convert.encoding import FORMATS, quantization_config
from proa.convert.writer import CheckpointWriter
from proa.core.errors import CheckpointError, ConfigError, ProaError
from proa.weights.formats import ROW_FORMATS
from proa.weights.json_file import read_json_object
from proa.weights.linear import RawLinear
from proa.weights.quantize import quantize

__all__ = ["DIMENSIONS", "RandomDimensions", "write_random_model"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True)
class RandomDimensions:
    """Dimensions of a qwen3_moe model; the vocabulary is the tokenizer's."""

    hidden_size: int
    moe_intermediate_size: int
    num_layers: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 40960


DIMENSIONS = {
    "qwen3-30b": RandomDimensions(2048, 768, 48, 128, 8, 32, 4, 128),
    "qwen3-235b": RandomDimensions(4096, 1536, 94, 128, 8, 64, 4, 128),
    "tiny": RandomDimensions(128, 128, 2, 8, 2, 4, 2, 32, max_positions=2048),
}


def write_random_model(
    directory: Path,
    dimensions: RandomDimensions,
    tokenizer: Path,
    *,
    format: str = "bf16",  # noqa: A002
    seed: int = 0,
    experts: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the checkpoint into `directory`, which must be empty or missing.

    `tokenizer` is a directory with tokenizer.json; its files are copied and its vocabulary gives the model's size.
    `experts`: False leaves the routed experts out, for a model that takes them from a GGUF file.

    Raises:
        ConfigError: `directory` holds something, or `format` is unknown or has groups that do not fit the dimensions.
        CheckpointError: `tokenizer` has no readable tokenizer.json.
    """
    if format not in FORMATS:
        raise ConfigError("format", f"one of {', '.join(FORMATS)}", repr(format))
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(str(directory), "an empty or missing directory", "something", "name another one")
    _check_groups(dimensions, format)
    vocab_size = _vocab_size(tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(directory, on_bytes=on_bytes) as writer:
        _write_tensors(writer, dimensions, vocab_size, format, np.random.default_rng(seed), experts=experts)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, directory / name)
    config = _config(dimensions, vocab_size, format, _eos_token_id(tokenizer))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _check_groups(dims: RandomDimensions, to: str) -> None:
    row_format = ROW_FORMATS[to]
    for width in (dims.hidden_size, dims.moe_intermediate_size, dims.num_heads * dims.head_dim):
        if row_format.group and not row_format.ragged and width % row_format.group:
            fix = "choose a format of smaller groups, or other dimensions"
            raise ConfigError("format", f"inputs in groups of {row_format.group} for {to}", width, fix)


def _write_tensors(
    writer: CheckpointWriter,
    dims: RandomDimensions,
    vocab_size: int,
    to: str,
    rng: np.random.Generator,
    *,
    experts: bool,
) -> None:
    def random(out_features: int, in_features: int, stored: str = to) -> RawLinear:
        weight = rng.standard_normal((out_features, in_features), dtype=np.float32)
        return quantize(weight * np.float32(INITIALIZER_RANGE), stored)

    def add_norm(name: str, size: int) -> None:
        writer.add(f"{name}.weight", plain_dtype, quantize(np.ones((1, size), np.float32), plain).data[0])

    plain = "f32" if to == "f32" else "bf16"
    plain_dtype = "F32" if to == "f32" else "BF16"
    hidden, width = dims.hidden_size, dims.moe_intermediate_size
    query, key = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    writer.add_linear("model.embed_tokens", random(vocab_size, hidden, plain))
    writer.add_linear("lm_head", random(vocab_size, hidden))
    add_norm("model.norm", hidden)
    for layer in range(dims.num_layers):
        prefix = f"model.layers.{layer}"
        add_norm(f"{prefix}.input_layernorm", hidden)
        add_norm(f"{prefix}.post_attention_layernorm", hidden)
        for name, shape in {
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
        }.items():
            writer.add_linear(f"{prefix}.self_attn.{name}", random(*shape))
        add_norm(f"{prefix}.self_attn.q_norm", dims.head_dim)
        add_norm(f"{prefix}.self_attn.k_norm", dims.head_dim)
        writer.add_linear(f"{prefix}.mlp.gate", random(dims.num_experts, hidden, plain))
        expert = {
            "gate_proj": random(width, hidden),
            "up_proj": random(width, hidden),
            "down_proj": random(hidden, width),
        }
        for index in range(dims.num_experts if experts else 0):
            for name, linear in expert.items():
                writer.add_linear(f"{prefix}.mlp.experts.{index}.{name}", _rolled(linear, index))


def _rolled(linear: RawLinear, rows: int) -> RawLinear:
    """The weight with its rows rolled. Scales of blocks belong to 128 rows and stay: those values are scaled anew."""
    scales = linear.scales
    if scales is not None and ROW_FORMATS[linear.format].rows == 1:
        scales = np.roll(scales, rows, axis=0)
    return replace(linear, data=np.roll(linear.data, rows, axis=0), scales=scales)


def _vocab_size(tokenizer: Path) -> int:
    """One more than the largest token id."""
    path = tokenizer / "tokenizer.json"
    content = read_json_object(path)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not vocab:
        raise CheckpointError(f"{path}: model.vocab", "a non-empty object", type(vocab).__name__)
    added = [token["id"] for token in content.get("added_tokens") or []]
    return int(max([*vocab.values(), *added])) + 1


def _eos_token_id(tokenizer: Path) -> Any:
    path = tokenizer / "generation_config.json"
    return read_json_object(path).get("eos_token_id") if path.exists() else None


def _config(dims: RandomDimensions, vocab_size: int, to: str, eos_token_id: Any) -> dict[str, Any]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.moe_intermediate_size * dims.top_k,  # of dense layers, which there are none of
        "moe_intermediate_size": dims.moe_intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "num_experts": dims.num_experts,
        "num_experts_per_tok": dims.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": dims.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "eos_token_id": eos_token_id,
        "dtype": "float32" if to == "f32" else "bfloat16",
    }
    quantization = quantization_config(to, ignore=[])
    return config if quantization is None else {**config, "quantization_config": quantization}


def _main() -> int:
    parser = argparse.ArgumentParser(description="Write a randomly weighted checkpoint for speed runs.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; empty or missing")
    parser.add_argument("--like", choices=sorted(DIMENSIONS), default="qwen3-30b", help="dimensions to take")
    parser.add_argument("--layers", type=int, default=None, help="number of layers; default: the real model's")
    parser.add_argument("--format", choices=FORMATS, default="int4_g32", help="of every linear")
    parser.add_argument(
        "--tokenizer", type=Path, default=None, help="directory with tokenizer.json; default: the demo's"
    )
    parser.add_argument("--no-experts", action="store_true", help="leave out the routed experts, which come from GGUF")
    arguments = parser.parse_args()
    dimensions = DIMENSIONS[arguments.like]
    try:
        if arguments.layers is not None:
            if arguments.layers < 1:
                raise ConfigError("--layers", "1 or more", arguments.layers)
            dimensions = replace(dimensions, num_layers=arguments.layers)
        tokenizer = arguments.tokenizer or ensure_demo_model()
        write_random_model(
            arguments.out, dimensions, tokenizer, format=arguments.format, experts=not arguments.no_experts
        )
    except ProaError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
