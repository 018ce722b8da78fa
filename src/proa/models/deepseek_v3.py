"""DeepSeek-V3, R1, V3.1 and Kimi K2: latent attention, noaux_tc router, shared experts, leading dense layers."""

from __future__ import annotations

from proa.models.config import ConfigRules, ModelConfig
from proa.models.decoder_layer import DecoderSpec
from proa.models.family import Family
from proa.models.moe_config import sigmoid_moe
from proa.models.specs import build_spec, mla_spec, moe_spec

__all__ = ["FAMILY"]

# The two latent norms keep the default of their class, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def _spec(config: ModelConfig) -> DecoderSpec:
    return build_spec(config, mla_spec(config, norm_eps=LATENT_NORM_EPS), moe_spec(config))


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    rules=ConfigRules(moe=sigmoid_moe, latent=True, qk_norm=False),
    spec=_spec,
)
