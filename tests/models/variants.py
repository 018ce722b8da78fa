"""Tiny random checkpoints of every family in every storage format, each with the transformers model it must equal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

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
WIDE_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 160} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Variant:
    """`storage`: f32, bf16, int4 (routed experts int4 g32, the rest bf16) or fp8 (every linear but router and head)."""

    name: str
    model_type: str
    storage: str
    config: dict[str, Any]
    served_type: str | None = None  # model_type in the config.json that proa reads

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
]


def build(variant: Variant, directory: Path) -> transformers.PreTrainedModel:
    """Writes the checkpoint proa reads to `directory` and returns the float32 transformers model of the same values."""
    reference = directory / "reference"
    _random_model(variant).save_pretrained(reference)
    tensors = load_file(reference / "model.safetensors")
    stored, plain, quantization = _store(tensors, variant.storage)
    save_file(plain, reference / "model.safetensors", {"format": "pt"})
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((reference / "config.json").read_text())
    config["model_type"] = variant.served_type or variant.model_type
    if quantization is not None:
        config["quantization_config"] = quantization
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


def _store(tensors: dict[str, torch.Tensor], storage: str) -> tuple[dict, dict, dict | None]:
    """Tensors as `storage` keeps them, the float32 values they stand for, and the quantization_config."""
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if storage == "int4" and ".experts." in name:
            stored |= {f"{linear}.{suffix}": part for suffix, part in quantize_int4(tensor).items()}
            plain[name] = dequantize_int4(stored[f"{linear}.weight_packed"], stored[f"{linear}.weight_scale"])
        elif storage == "fp8" and name.endswith("_proj.weight"):
            stored |= {f"{linear}.{suffix}": part for suffix, part in quantize_fp8(tensor).items()}
            plain[name] = dequantize_fp8(stored[name], stored[f"{linear}.weight_scale_inv"])
        elif storage == "f32" or "e_score_correction_bias" in name:
            stored[name] = plain[name] = tensor
        else:
            stored[name] = tensor.to(torch.bfloat16)
            plain[name] = stored[name].float()
    return stored, plain, QUANTIZATION.get(storage)


QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                },
            }
        },
    },
}


def quantize_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors int4 g32. Scales of 4 significant bits: values are exact in bf16, what transformers keeps."""
    groups = weight.unflatten(1, (-1, 32))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / 7)
    scale = torch.ldexp((mantissa * 16).ceil() / 16, exponent)
    nibbles = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    words = (nibbles.reshape(weight.shape[0], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Element 8w + k of a row is bits 4k .. 4k + 3 of word w, minus 8, times the scale of its 32 columns."""
    words = packed.numpy().view(np.uint32)
    q = np.stack([(words >> (4 * k)) & 15 for k in range(8)], axis=-1).reshape(packed.shape[0], -1).astype(np.int32) - 8
    return torch.from_numpy(q.astype(np.float32) * np.repeat(scale.float().numpy(), 32, axis=1))


def quantize_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // 128), -(-columns // 128))
    quantized = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale[i, j] = block.abs().max() / 448
            quantized[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": quantized, "weight_scale_inv": scale}


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """value = e4m3 * scale[i // 128][j // 128]; e4m3 decoded from its bits (OCP 8-bit floating point, 2023)."""
    bits = weight.view(torch.uint8).numpy().astype(np.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where(bits & 128, -magnitude, magnitude).astype(np.float32)
    rows, columns = np.indices(value.shape) // 128
    return torch.from_numpy(value * scale.numpy()[rows, columns])
