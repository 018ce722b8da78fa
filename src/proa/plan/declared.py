"""A checkpoint that is not there yet: its tensors as config.json, and the index where there is one, declare them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proa.core.errors import UnsupportedError
from proa.layers.mla import MlaSpec
from proa.models.config import ModelConfig
from proa.models.decoder_layer import DecoderSpec
from proa.models.registry import decoder_spec, read_config
from proa.weights.checkpoint import (
    INDEX_FILE,
    MAX_CONFIG_BYTES,
    SINGLE_FILE,
    Checkpoint,
    language_model_name,
    quantization_config,
    read_index,
)
from proa.weights.formats import ROW_FORMATS
from proa.weights.json_file import read_json_object
from proa.weights.quantization import Quantization, parse_quantization
from proa.weights.safetensors import SafetensorsFile, TensorEntry

__all__ = ["DeclaredTensor", "declared_checkpoint", "declared_tensors", "is_complete", "open_declared"]

_PLAIN = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
# What a linear has beside or instead of `weight` when it is quantized.
_QUANTIZED_SUFFIXES = ("weight_packed", "weight_scale_inv", "weight_scale", "scale", "qweight")
_ROUTER_BIAS = "e_score_correction_bias"  # float32 in checkpoints of any type
# Where the methods list what is left as it is.
_EXCEPTION_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor by its shape. `part`: what it belongs to, as lists of exceptions call it; "" for no linear."""

    name: str
    shape: tuple[int, ...]
    part: Literal["", "experts", "self_attn", "shared_experts", "mlp", "lm_head"] = ""


def is_complete(directory: Path) -> bool:
    """Whether the weights lie beside config.json, so that headers say more than shapes."""
    if (directory / SINGLE_FILE).exists():
        return True
    index = directory / INDEX_FILE
    return index.exists() and all((directory / shard).exists() for shard in set(read_index(index).values()))


def open_declared(path: str | Path) -> Checkpoint:
    """The checkpoint that config.json at `path` describes, with sizes only: no tensor of it can be read.

    Raises:
        CheckpointError: no config.json, or a faulty one. UnsupportedError: a family or quantization proa lacks.
    """
    directory = Path(path)
    values = read_json_object(directory / "config.json", MAX_CONFIG_BYTES)
    index = read_index(directory / INDEX_FILE) if (directory / INDEX_FILE).exists() else None
    names = None if index is None else frozenset(language_model_name(name) for name in index)
    return declared_checkpoint(values, directory, names)


def declared_checkpoint(values: dict[str, Any], directory: Path, names: frozenset[str] | None = None) -> Checkpoint:
    """Of a parsed config.json. `names`: of the stored tensors where an index lists them."""
    where = str(directory / "config.json")
    config = read_config(values, where)
    quantization = parse_quantization(quantization_config(values), where)
    spec, plain = decoder_spec(config), _plain_format(config, where)
    exceptions = _exceptions(values)
    entries = {}
    for tensor in declared_tensors(spec):
        quantized = quantization.formats is not None and _is_quantized(tensor, names, exceptions)
        name = _format(tensor, quantization) if quantized else plain
        if tensor.name.endswith(_ROUTER_BIAS):
            name = "f32"
        entries[tensor.name] = _entry(tensor, name)
    # Nothing is mapped but one empty page.
    file = SafetensorsFile(directory, mmap.mmap(-1, mmap.PAGESIZE), entries, {})
    return Checkpoint(directory, values, quantization, [file])


def declared_tensors(spec: DecoderSpec) -> Iterator[DeclaredTensor]:
    """Every tensor of a decoder, by the names proa reads."""
    yield DeclaredTensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden))
    yield DeclaredTensor("model.norm.weight", (spec.hidden,))
    if not spec.tied_head:
        yield DeclaredTensor("lm_head.weight", (spec.vocab_size, spec.hidden), "lm_head")
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield DeclaredTensor(f"{prefix}.input_layernorm.weight", (spec.hidden,))
        yield DeclaredTensor(f"{prefix}.post_attention_layernorm.weight", (spec.hidden,))
        yield from _attention(spec, f"{prefix}.self_attn")
        if layer in spec.moe_layers:
            yield from _moe(spec, f"{prefix}.{spec.moe.block}")
        else:
            yield from _mlp(f"{prefix}.mlp", "mlp", spec.hidden, spec.dense_intermediate)


def _attention(spec: DecoderSpec, prefix: str) -> Iterator[DeclaredTensor]:
    attention, hidden = spec.attention, spec.hidden
    linears: dict[str, tuple[int, int]] = {}
    vectors: dict[str, int] = {}
    biased: tuple[str, ...]
    if isinstance(attention, MlaSpec):
        query = attention.num_heads * (attention.nope_dim + attention.rope_dim)
        rank = attention.q_lora_rank
        if rank is None:
            linears["q_proj"] = (query, hidden)
        else:
            linears |= {"q_a_proj": (rank, hidden), "q_b_proj": (query, rank)}
            vectors["q_a_layernorm.weight"] = rank
        linears["kv_a_proj_with_mqa"] = (attention.kv_lora_rank + attention.rope_dim, hidden)
        vectors["kv_a_layernorm.weight"] = attention.kv_lora_rank
        expanded = attention.num_heads * (attention.nope_dim + attention.value_dim)
        linears["kv_b_proj"] = (expanded, attention.kv_lora_rank)
        linears["o_proj"] = (hidden, attention.num_heads * attention.value_dim)
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if attention.bias else ()
    else:
        rows = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        names = ("q_proj", "k_proj", "v_proj")
        linears = {name: (heads * attention.head_dim, hidden) for name, heads in zip(names, rows, strict=True)}
        linears["o_proj"] = (hidden, attention.num_heads * attention.head_dim)
        biased = (names if attention.qkv_bias else ()) + (("o_proj",) if attention.output_bias else ())
        if attention.qk_norm_eps is not None:
            vectors = {f"{name}.weight": attention.head_dim for name in ("q_norm", "k_norm")}
    for name, shape in linears.items():
        yield DeclaredTensor(f"{prefix}.{name}.weight", shape, "self_attn")
        if name in biased:
            yield DeclaredTensor(f"{prefix}.{name}.bias", shape[:1])
    for name, size in vectors.items():
        yield DeclaredTensor(f"{prefix}.{name}", (size,))


def _moe(spec: DecoderSpec, prefix: str) -> Iterator[DeclaredTensor]:
    moe = spec.moe
    yield DeclaredTensor(f"{prefix}.gate.weight", (moe.router.num_experts, spec.hidden))
    if moe.router.bias:
        yield DeclaredTensor(f"{prefix}.gate.{_ROUTER_BIAS}", (moe.router.num_experts,))
    if moe.shared_intermediate:
        yield from _mlp(f"{prefix}.shared_experts", "shared_experts", spec.hidden, moe.shared_intermediate)
    names = (moe.names.gate, moe.names.up, moe.names.down)
    for expert in range(moe.router.num_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", "experts", spec.hidden, moe.intermediate, names)


def _mlp(
    prefix: str,
    part: Literal["experts", "shared_experts", "mlp"],
    hidden: int,
    intermediate: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[DeclaredTensor]:
    gate, up, down = names
    yield DeclaredTensor(f"{prefix}.{gate}.weight", (intermediate, hidden), part)
    yield DeclaredTensor(f"{prefix}.{up}.weight", (intermediate, hidden), part)
    yield DeclaredTensor(f"{prefix}.{down}.weight", (hidden, intermediate), part)


def _plain_format(config: ModelConfig, where: str) -> str:
    found = _PLAIN.get(config.dtype)
    if found is None:
        raise UnsupportedError(f"{where}: dtype", " or ".join(_PLAIN), repr(config.dtype)[:200])
    return found


def _exceptions(values: dict[str, Any]) -> tuple[str, ...]:
    found = quantization_config(values)
    lists = [found.get(key) for key in _EXCEPTION_KEYS] if isinstance(found, dict) else []
    return tuple(item for items in lists if isinstance(items, list) for item in items if isinstance(item, str))


def _is_quantized(tensor: DeclaredTensor, names: frozenset[str] | None, exceptions: tuple[str, ...]) -> bool:
    """Where no index tells, an exception that mentions a part leaves all of it; its patterns are not matched."""
    if tensor.part == "":
        return False
    if names is not None:
        prefix = tensor.name.removesuffix("weight")
        if any(prefix + suffix in names for suffix in _QUANTIZED_SUFFIXES):
            return True
        # Experts may have other names, those of all experts in one tensor.
        return tensor.part == "experts" and tensor.name not in names
    if tensor.part == "experts":
        return True
    return tensor.part != "lm_head" and not any(tensor.part in exception for exception in exceptions)


def _format(tensor: DeclaredTensor, quantization: Quantization) -> str:
    """The declared format; of two, the smaller one is that of the routed experts."""
    ranked = sorted(quantization.formats or (), key=lambda name: (ROW_FORMATS[name].bytes_per_element, name))
    return ranked[0] if tensor.part == "experts" else ranked[-1]


def _entry(tensor: DeclaredTensor, weight_format: str) -> TensorEntry:
    rows, columns = (1, tensor.shape[0]) if len(tensor.shape) == 1 else tensor.shape
    nbytes = ROW_FORMATS[weight_format].nbytes(rows, columns)
    return TensorEntry(tensor.name, _DTYPES.get(weight_format, weight_format), tensor.shape, 0, nbytes)
