"""Qwen3 MoE: grouped-query attention with per-head QK norm, softmax router, no shared experts."""

from __future__ import annotations

from proa.models.config import MAX_WIDTH, ConfigRules, ModelConfig, MoeConfig
from proa.models.config_fields import ConfigFields
from proa.models.decoder_layer import DecoderSpec
from proa.models.family import Family
from proa.models.moe_config import softmax_moe
from proa.models.specs import build_spec, gqa_spec, moe_spec

__all__ = ["FAMILY"]


def _moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    step = fields.integer("decoder_sparse_step", 1, 4096, 1)
    dense = set(fields.integers("mlp_only_layers", 0, num_layers - 1))
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    intermediate_size = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    return softmax_moe(fields, intermediate_size, fields.boolean("norm_topk_prob"), layers)


def _spec(config: ModelConfig) -> DecoderSpec:
    return build_spec(config, gqa_spec(config, output_bias=config.attention_bias), moe_spec(config))


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    rules=ConfigRules(moe=_moe, qk_norm=True),
    spec=_spec,
)
