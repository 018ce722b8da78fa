"""Tiny random checkpoints of every family in every storage format, each with the transformers model it must equal."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.storages import STORAGES, Storage

VOCAB = 96
LAYERS = 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "intermediate_size": 96,
}
SIGMOID_MOE = COMMON | {
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
MLA = SIGMOID_MOE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
YARN_GROUPS = {"n_group": 4, "topk_group": 2, "rope_scaling": YARN, "rms_norm_eps": 1e-3}
# Nothing here is a multiple of 128: every fp8 block grid has a ragged edge in both directions.
RAGGED = {"hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 144}
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128}
QWEN3 = COMMON | GQA | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
WIDE_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 160} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Variant:
    """`storage`: a key of STORAGES; `fused`: all experts of a layer in one tensor."""

    name: str
    model_type: str
    storage: str
    config: dict[str, Any]
    served_type: str | None = None  # model_type in the config.json that proa reads
    fused: bool = False

    def __str__(self) -> str:
        return self.name


VARIANTS = [
    Variant("deepseek_groups_yarn", "deepseek_v3", "f32", MLA | YARN_GROUPS),
    Variant("deepseek_bf16", "deepseek_v3", "bf16", MLA | {"n_group": 2, "topk_group": 1}),
    Variant("deepseek_fp8", "deepseek_v3", "fp8", MLA | RAGGED | {"n_group": 4, "topk_group": 2}),
    Variant("deepseek_fp8_blocks", "deepseek_v3", "fp8", MLA | RAGGED | WIDE_HEADS),
    Variant("deepseek_direct_q", "deepseek_v3", "f32", MLA | {"q_lora_rank": None, "attention_bias": True}),
    Variant("deepseek_halves", "deepseek_v3", "bf16", MLA | {"attention_bias": True, "rope_interleave": False}),
    Variant("kimi_int4", "deepseek_v3", "int4", MLA | {"rope_scaling": YARN, "rms_norm_eps": 1e-5}, "kimi_k2"),
    Variant("kimi_fp8", "deepseek_v3", "fp8", MLA | RAGGED | {"q_lora_rank": 128}, "kimi_k2"),
    Variant("glm_norm_bias", "glm4_moe", "f32", SIGMOID_MOE | GQA | {"use_qk_norm": True, "attention_bias": True}),
    Variant("glm_bias_bf16", "glm4_moe", "bf16", SIGMOID_MOE | GQA | {"attention_bias": True}),
    Variant(
        "glm_tied_int4",
        "glm4_moe",
        "int4",
        SIGMOID_MOE | GQA | {"partial_rotary_factor": 1.0, "tie_word_embeddings": True, "norm_topk_prob": False},
    ),
    Variant(
        "qwen3",
        "qwen3_moe",
        "f32",
        COMMON
        | GQA
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
        | {
            "mlp_only_layers": [1],
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    Variant(
        "qwen3_fp8",
        "qwen3_moe",
        "fp8",
        COMMON | GQA | RAGGED | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    Variant(
        "qwen3_bias_bf16",
        "qwen3_moe",
        "bf16",
        COMMON
        | GQA
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": False}
        | {"attention_bias": True, "decoder_sparse_step": 2},
    ),
    Variant(
        "qwen3_int4",
        "qwen3_moe",
        "int4",
        COMMON
        | GQA
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    Variant("glm_fp8", "glm4_moe", "fp8", SIGMOID_MOE | GQA | RAGGED | {"attention_bias": True}),
    Variant("mixtral_fp8", "mixtral", "fp8", COMMON | {"num_key_value_heads": 2, "num_local_experts": 4} | RAGGED),
    Variant(
        "mixtral_tied",
        "mixtral",
        "f32",
        COMMON | {"num_key_value_heads": 1, "num_local_experts": 4, "tie_word_embeddings": True},
    ),
    Variant("mixtral_bf16", "mixtral", "bf16", COMMON | {"num_key_value_heads": 2, "num_local_experts": 4}),
    Variant("qwen3_fused", "qwen3_moe", "bf16", QWEN3, fused=True),
    Variant("glm_fused", "glm4_moe", "f32", SIGMOID_MOE | GQA, fused=True),
    Variant("qwen3_int4_g64", "qwen3_moe", "int4_g64", QWEN3 | WIDE),
    Variant("kimi_int4_g128_f16", "deepseek_v3", "int4_g128", MLA | WIDE, "kimi_k2"),
    Variant("mixtral_gptq", "mixtral", "gptq", COMMON | {"num_key_value_heads": 2, "num_local_experts": 4}),
    Variant("qwen3_nvfp4", "qwen3_moe", "nvfp4", QWEN3),
    Variant("glm_mxfp4", "glm4_moe", "mxfp4", SIGMOID_MOE | GQA),
    Variant("deepseek_fp8_powers", "deepseek_v3", "fp8_powers", MLA | RAGGED),
    Variant("glm_fp8_channel", "glm4_moe", "fp8_channel", SIGMOID_MOE | GQA | RAGGED),
    Variant("glm_int8", "glm4_moe", "int8", SIGMOID_MOE | GQA | {"hidden_size": 160, "moe_intermediate_size": 96}),
    Variant("mixtral_mxfp8", "mixtral", "mxfp8", COMMON | {"num_key_value_heads": 2, "num_local_experts": 4}),
]


def build(variant: Variant, directory: Path) -> transformers.PreTrainedModel:
    """Writes the checkpoint proa reads to `directory` and returns the float32 transformers model of the same values."""
    reference = directory / "reference"
    _random_model(variant).save_pretrained(reference)
    tensors = load_file(reference / "model.safetensors")
    storage = STORAGES[variant.storage]
    stored, plain = _store(tensors, storage)
    save_file(plain, reference / "model.safetensors", {"format": "pt"})
    stored = _fuse(stored) if variant.fused else stored
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((reference / "config.json").read_text())
    config["model_type"] = variant.served_type or variant.model_type
    if storage.quantization is not None:
        config["quantization_config"] = storage.quantization
    (directory / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _random_model(variant: Variant) -> transformers.PreTrainedModel:
    """Every parameter random, norms around 1, so that nothing left out goes unnoticed."""
    config = transformers.AutoConfig.for_model(variant.model_type, **variant.config)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(sum(map(ord, variant.name)))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        spread = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2
        noise = torch.empty(tensor.shape).normal_(0, spread * (1.5 if "embed" not in name else 8), generator=generator)
        tensor.data.copy_(noise + (1.0 if name.endswith("norm.weight") else 0.0))
    return model


def _store(tensors: dict[str, torch.Tensor], storage: Storage) -> tuple[dict, dict]:
    """Tensors as `storage` keeps them, and the float32 values they stand for."""
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if storage.quantizes(name):
            parts = storage.store(tensor)
            stored |= {f"{linear}.{suffix}": part for suffix, part in parts.items()}
            plain[name] = storage.value(parts)
        elif "e_score_correction_bias" in name:
            stored[name] = plain[name] = tensor
        else:
            stored[name] = tensor.to(storage.trunk)
            plain[name] = stored[name].float()
    return stored, plain


def _fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in two tensors, as Qwen3.5 has them: gate rows before up rows."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if expert is None:
            rest[name] = tensor
        else:
            found.setdefault(expert[1], {})[int(expert[2]), expert[3]] = tensor
    for prefix, experts in found.items():
        numbers = sorted({number for number, _ in experts})
        both = [torch.cat([experts[e, "gate_proj"], experts[e, "up_proj"]]) for e in numbers]
        rest[f"{prefix}.gate_up_proj"] = torch.stack(both)
        rest[f"{prefix}.down_proj"] = torch.stack([experts[e, "down_proj"] for e in numbers])
    return rest
