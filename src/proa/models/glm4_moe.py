"""GLM-4.5, 4.6 and 4.7: grouped-query attention with q/k/v bias and partial rotation, DeepSeek-V3's MoE block."""

from __future__ import annotations

from proa.models.config import ConfigRules, ModelConfig
from proa.models.decoder_layer import DecoderSpec
from proa.models.family import Family
from proa.models.moe_config import sigmoid_moe
from proa.models.specs import build_spec, gqa_spec, moe_spec

__all__ = ["FAMILY"]


def _spec(config: ModelConfig) -> DecoderSpec:
    return build_spec(config, gqa_spec(config), moe_spec(config))


FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    rules=ConfigRules(moe=sigmoid_moe, partial_rotary_factor=0.5),
    spec=_spec,
)
