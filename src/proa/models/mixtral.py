"""Mixtral: grouped-query attention, softmax router, experts named w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from proa.layers.mlp import MlpNames
from proa.models.config import ModelConfig
from proa.models.decoder import DecoderSpec
from proa.models.specs import decoder_spec, gqa_spec, moe_spec

__all__ = ["spec"]


def spec(config: ModelConfig) -> DecoderSpec:
    """Layers of a Mixtral configuration."""
    moe = moe_spec(config, block="block_sparse_moe", names=MlpNames(gate="w1", up="w3", down="w2"))
    return decoder_spec(config, gqa_spec(config), moe)
