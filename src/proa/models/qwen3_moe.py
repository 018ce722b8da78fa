"""Qwen3 MoE: grouped-query attention with per-head QK norm, softmax router, no shared experts."""

from __future__ import annotations

from proa.models.config import ModelConfig
from proa.models.decoder import DecoderSpec
from proa.models.specs import decoder_spec, gqa_spec, moe_spec

__all__ = ["spec"]


def spec(config: ModelConfig) -> DecoderSpec:
    """Layers of a Qwen3 MoE configuration."""
    return decoder_spec(config, gqa_spec(config, output_bias=config.attention_bias), moe_spec(config))
