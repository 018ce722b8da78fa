"""DeepSeek-V3, R1, V3.1 and Kimi K2: latent attention, noaux_tc router, shared experts, leading dense layers."""

from __future__ import annotations

from proa.models.config import ModelConfig
from proa.models.decoder import DecoderSpec
from proa.models.specs import decoder_spec, mla_spec, moe_spec

__all__ = ["spec"]

# The two latent norms keep the default of their class, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def spec(config: ModelConfig) -> DecoderSpec:
    """Layers of a DeepSeek-V3 or Kimi K2 configuration."""
    return decoder_spec(config, mla_spec(config, norm_eps=LATENT_NORM_EPS), moe_spec(config))
