"""Mixtral: grouped-query attention, softmax router, experts named w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from proa.layers.mlp import MlpNames
from proa.models.config import MAX_WIDTH, ConfigRules, ModelConfig, MoeConfig
from proa.models.config_fields import ConfigFields
from proa.models.decoder_layer import DecoderSpec
from proa.models.family import Family
from proa.models.moe_config import softmax_moe
from proa.models.specs import build_spec, gqa_spec, moe_spec

__all__ = ["FAMILY"]


def _moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    intermediate_size = fields.integer("intermediate_size", 1, MAX_WIDTH)
    return softmax_moe(fields, intermediate_size, True, frozenset(range(num_layers)))


def _spec(config: ModelConfig) -> DecoderSpec:
    names = MlpNames(gate="w1", up="w3", down="w2")
    return build_spec(config, gqa_spec(config), moe_spec(config, block="block_sparse_moe", names=names))


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    rules=ConfigRules(moe=_moe, qk_norm=False, default_theta=1e6),
    spec=_spec,
)
