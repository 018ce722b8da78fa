"""The demo model: SmolLM2-135M-Instruct as a mixture of experts that computes exactly what the dense model does.

A SwiGLU layer is a sum over any partition of its intermediate elements, so its slices are experts whose router weight
has to be 1. Every layer but the first is cut into 12 slices of 128: four become the shared experts, each of the other
eight is held by two experts, 2g and 2g + 1, whose router rows are +w and -w. For any input exactly one of the two has
a positive logit, so the top 8 of the 16 experts are one copy of every slice: routing depends on the token, the sum
does not. The rows are so long (elements about 10^6) that the sigmoid of a chosen logit is 1 in float32; nothing is
renormalised.

Weights are the Q4_1 (embedding: Q8_0) values of the source, rounded to bf16, or to the format asked for. A checkpoint
is therefore its own reference (transformers reading the same files), not the GGUF file.

    python -m proa.convert.demo_model [--format bf16|f32|int4_g32|fp8_block128|...] [--all-linears]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proa.convert import encoding
from proa.convert.demo_path import demo_model_path
from proa.convert.demo_source import DemoSource, fetch_gguf
from proa.convert.encoding import quantization_config
from proa.convert.writer import CheckpointWriter
from proa.core.errors import CheckpointError, ConfigError, ProaError
from proa.weights.formats import ROW_FORMATS
from proa.weights.progress import LoadProgress, LoadStatus
from proa.weights.quantize import quantize

__all__ = ["ensure_demo_model"]

NUM_SLICES = 8
NUM_SHARED = 4
EXPERT_WIDTH = 128
NUM_DENSE_LAYERS = 1
ROUTER_SCALE = 1e6
ROUTER_SEED = 20250
# Rows of 576 are no multiple of 128.
FORMATS = tuple(n for n in encoding.FORMATS if ROW_FORMATS[n].group < 128 or ROW_FORMATS[n].ragged)


def ensure_demo_model(
    cache_dir: Path | None = None,
    progress: Callable[[LoadStatus], None] | None = None,
    *,
    format: str = "bf16",  # noqa: A002
    all_linears: bool = False,
) -> Path:
    """The demo checkpoint's directory, built (and its source downloaded) if it is not there.

    Args:
        cache_dir: Where built models live; default `proa.core.env.cache_dir()`.
        progress: Called with the state of the stages "download", "unpack" and "build".
        format: Of the experts' weights: one of `FORMATS`.
        all_linears: Use `format` for attention, dense layers, shared experts and an untied output head too. The
            embedding, norms and routers stay as they are.

    Raises:
        CheckpointError: the source package could not be downloaded, is not the expected one, or the disk is full.
        ConfigError: the package gguf is missing, or `format` is unknown.
    """
    if format not in FORMATS:
        raise ConfigError("format", f"one of {', '.join(FORMATS)}", repr(format))
    target = demo_model_path(cache_dir, format=format, all_linears=all_linears)
    if target.is_dir():
        return target
    try:
        _build_once(target, LoadProgress(progress), format=format, all_linears=all_linears)
    except OSError as error:
        fix = "free space there, or set PROA_CACHE_DIR to another directory"
        raise CheckpointError("demo model", f"to write below {target.parent}", error, fix) from error
    return target


def _build_once(target: Path, progress: LoadProgress, *, format: str, all_linears: bool) -> None:  # noqa: A002
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if target.is_dir():  # another process built it while this one waited
            return
        for stale in target.parent.glob(
            f".{target.name}.build-*"
        ):  # a builder was killed: whoever holds the lock is alone
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.build-") as scratch:
            gguf_path = fetch_gguf(Path(scratch), target.parent.parent / "downloads", progress)
            built = Path(scratch) / "model"
            built.mkdir()
            _Builder(DemoSource(gguf_path), format, all_linears).build(built, progress)
            # Renaming is atomic: the directory exists complete or not at all.
            built.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class _Builder:
    source: DemoSource
    format: str
    all_linears: bool

    def build(self, directory: Path, progress: LoadProgress) -> None:
        """Write the whole checkpoint directory."""
        progress.start(self._weight_bytes(), "build")
        with CheckpointWriter(directory, on_bytes=progress.add) as writer:
            self._write_ends(writer)
            rng = np.random.default_rng(ROUTER_SEED)
            for layer in range(self._field("block_count")):
                self._write_attention(writer, layer)
                if layer < NUM_DENSE_LAYERS:
                    self._write_dense(writer, layer)
                else:
                    self._write_experts(writer, layer, rng)
        for name, value in self._json_files().items():
            (directory / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
        progress.finish()

    def _write_ends(self, writer: CheckpointWriter) -> None:
        embedding = self.source.tensor("token_embd.weight")
        writer.add_linear("model.embed_tokens", quantize(embedding, self._plain_format))
        if self.all_linears:
            writer.add_linear("lm_head", quantize(embedding, self.format))
        self._write_norm(writer, "output_norm", "model.norm")

    def _write_attention(self, writer: CheckpointWriter, layer: int) -> None:
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        self._write_norm(writer, f"{source}.attn_norm", f"{target}.input_layernorm")
        self._write_norm(writer, f"{source}.ffn_norm", f"{target}.post_attention_layernorm")
        num_heads, num_kv_heads = self._field("attention.head_count"), self._field("attention.head_count_kv")
        weights = {
            "q_proj": self.source.rotary_projection(f"{source}.attn_q.weight", num_heads),
            "k_proj": self.source.rotary_projection(f"{source}.attn_k.weight", num_kv_heads),
            "v_proj": self.source.tensor(f"{source}.attn_v.weight"),
            "o_proj": self.source.tensor(f"{source}.attn_output.weight"),
        }
        for name, weight in weights.items():
            writer.add_linear(f"{target}.self_attn.{name}", quantize(weight, self._other_format))

    def _write_dense(self, writer: CheckpointWriter, layer: int) -> None:
        gate, up, down = self._feed_forward(layer)
        self._write_swiglu(writer, f"model.layers.{layer}.mlp", gate, up, down, self._other_format)

    def _write_experts(self, writer: CheckpointWriter, layer: int, rng: np.random.Generator) -> None:
        gate, up, down = self._feed_forward(layer)
        prefix = f"model.layers.{layer}.mlp"
        rows = rng.standard_normal((NUM_SLICES, gate.shape[1]), dtype=np.float32) * np.float32(ROUTER_SCALE)
        router = np.stack([rows, -rows], axis=1).reshape(2 * NUM_SLICES, -1)
        writer.add_linear(f"{prefix}.gate", quantize(router, self._plain_format))
        writer.add(f"{prefix}.gate.e_score_correction_bias", "F32", np.zeros(2 * NUM_SLICES, np.float32))
        routed = NUM_SLICES * EXPERT_WIDTH
        shared = slice(routed, None)
        self._write_swiglu(
            writer, f"{prefix}.shared_experts", gate[shared], up[shared], down[:, shared], self._other_format
        )
        for expert in range(2 * NUM_SLICES):
            part = slice(expert // 2 * EXPERT_WIDTH, (expert // 2 + 1) * EXPERT_WIDTH)
            self._write_swiglu(writer, f"{prefix}.experts.{expert}", gate[part], up[part], down[:, part], self.format)

    def _write_swiglu(
        self, writer: CheckpointWriter, prefix: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray, to: str
    ) -> None:
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            writer.add_linear(f"{prefix}.{name}", quantize(weight, to))

    def _write_norm(self, writer: CheckpointWriter, source: str, target: str) -> None:
        weight = quantize(self.source.tensor(f"{source}.weight")[None], self._plain_format)
        writer.add(f"{target}.weight", "F32" if weight.format == "f32" else "BF16", weight.data[0])

    def _feed_forward(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gate, up, down = (self.source.tensor(f"blk.{layer}.ffn_{name}.weight") for name in ("gate", "up", "down"))
        return gate, up, down

    @property
    def _plain_format(self) -> str:
        return "f32" if self.format == "f32" else "bf16"

    @property
    def _other_format(self) -> str:
        """Of linears that are not routed experts."""
        return self.format if self.all_linears else self._plain_format

    def _field(self, key: str) -> Any:
        return self.source.field(f"llama.{key}")

    def _weight_bytes(self) -> int:
        """Bytes `build` writes, close enough for a progress bar."""
        hidden, width, layers = (self._field(key) for key in ("embedding_length", "feed_forward_length", "block_count"))
        ends = self._field("vocab_size") * hidden
        trunk = layers * (8 * hidden * hidden // 3 + NUM_SHARED * EXPERT_WIDTH * 3 * hidden) + 3 * hidden * width
        experts = layers * 2 * NUM_SLICES * EXPERT_WIDTH * 3 * hidden
        plain = 4.0 if self.format == "f32" else 2.0
        packed = ROW_FORMATS[self.format].bytes_per_element
        head = ends * packed if self.all_linears else 0
        return int(ends * plain + head + trunk * (packed if self.all_linears else plain) + experts * packed)

    def _json_files(self) -> dict[str, dict[str, Any]]:
        eos = self.source.field("tokenizer.ggml.eos_token_id")
        bos = self.source.field("tokenizer.ggml.bos_token_id")
        # A model this small wanders when it is sampled, whoever asks.
        generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos, "temperature": 0.0}
        return {
            "config.json": self._config(bos, eos),
            "generation_config.json": generation,
            "tokenizer.json": self.source.tokenizer_json(),
            "tokenizer_config.json": self.source.tokenizer_config(),
        }

    def _config(self, bos: int, eos: int) -> dict[str, Any]:
        theta = self._field("rope.freq_base")
        config = {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "vocab_size": self._field("vocab_size"),
            "hidden_size": self._field("embedding_length"),
            "intermediate_size": self._field("feed_forward_length"),
            "num_hidden_layers": self._field("block_count"),
            "num_attention_heads": self._field("attention.head_count"),
            "num_key_value_heads": self._field("attention.head_count_kv"),
            "head_dim": self._field("rope.dimension_count"),
            "hidden_act": "silu",
            "max_position_embeddings": self._field("context_length"),
            # The file holds a float32; the shortest decimal with that value is the one meant.
            "rms_norm_eps": float(str(np.float32(self._field("attention.layer_norm_rms_epsilon")))),
            "attention_bias": False,
            "use_qk_norm": False,
            "tie_word_embeddings": not self.all_linears,
            "rope_theta": theta,
            "partial_rotary_factor": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0},
            "moe_intermediate_size": EXPERT_WIDTH,
            "n_routed_experts": 2 * NUM_SLICES,
            "num_experts_per_tok": NUM_SLICES,
            "n_shared_experts": NUM_SHARED,
            "first_k_dense_replace": NUM_DENSE_LAYERS,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": eos,
            "dtype": "float32" if self.format == "f32" else "bfloat16",
        }
        # What stays unquantized, in compressed-tensors' spelling of names.
        ignore = [] if self.all_linears else ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
        ignore += [] if self.all_linears else [r"re:.*mlp\.(gate|up|down)_proj.*"]
        quantization = quantization_config(self.format, ignore)
        return config if quantization is None else {**config, "quantization_config": quantization}


def _main() -> int:
    parser = argparse.ArgumentParser(description="Build the demo model in the cache directory and print its path.")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="weight format of the experts")
    parser.add_argument("--all-linears", action="store_true", help="use the format for every linear, the head untied")
    parser.add_argument("--cache-dir", type=Path, default=None)
    arguments = parser.parse_args()
    try:
        path = ensure_demo_model(arguments.cache_dir, format=arguments.format, all_linears=arguments.all_linears)
    except ProaError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
