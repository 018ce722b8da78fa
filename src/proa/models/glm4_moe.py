"""GLM-4.5, 4.6 and 4.7: grouped-query attention with q/k/v bias and partial rotation, DeepSeek-V3's MoE block."""

from __future__ import annotations

from proa.models.config import ModelConfig
from proa.models.decoder import DecoderSpec
from proa.models.specs import decoder_spec, gqa_spec, moe_spec

__all__ = ["spec"]


def spec(config: ModelConfig) -> DecoderSpec:
    """Layers of a GLM-4 MoE configuration."""
    return decoder_spec(config, gqa_spec(config, output_bias=False), moe_spec(config))
