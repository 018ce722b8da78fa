"""The model families: one entry each. `ModelConfig.family` is the key."""

from __future__ import annotations

from collections.abc import Callable

from proa.models import deepseek_v3, glm4_moe, mixtral, qwen3_moe
from proa.models.config import ModelConfig
from proa.models.decoder import DecoderSpec

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Callable[[ModelConfig], DecoderSpec]] = {
    "deepseek_v3": deepseek_v3.spec,
    "glm4_moe": glm4_moe.spec,
    "mixtral": mixtral.spec,
    "qwen3_moe": qwen3_moe.spec,
}
