"""The model families, one entry each, and the way from a config.json to one of them."""

from __future__ import annotations

from typing import Any

from proa.core.errors import UnsupportedError
from proa.models import deepseek_v3, glm4_moe, mixtral, qwen3_moe
from proa.models.config import ModelConfig, normalise
from proa.models.config_fields import ConfigFields
from proa.models.decoder_layer import DecoderSpec
from proa.models.family import Family
from proa.weights.checkpoint import Checkpoint

__all__ = ["FAMILIES", "SUPPORTED_MODEL_TYPES", "checkpoint_config", "decoder_spec", "read_config"]

FAMILIES: tuple[Family, ...] = (deepseek_v3.FAMILY, glm4_moe.FAMILY, qwen3_moe.FAMILY, mixtral.FAMILY)

SUPPORTED_MODEL_TYPES = tuple(model_type for family in FAMILIES for model_type in family.model_types)


def checkpoint_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a checkpoint, with the end-of-sequence ids of generation_config.json added."""
    where = str(checkpoint.path / "config.json")
    return read_config(checkpoint.config, where, checkpoint.generation_config)


def read_config(
    values: dict[str, Any], where: str = "config.json", generation_config: dict[str, Any] | None = None
) -> ModelConfig:
    """Normalises a parsed config.json; multimodal wrappers nest the language model's part in `text_config`.

    CheckpointError naming the key for a missing or wrong value; UnsupportedError for an architecture or option proa
    lacks.
    """
    fields = ConfigFields(values, where)
    fields = fields.object("text_config") or fields
    model_type = fields.string("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            generation = ConfigFields(generation_config or {}, "generation_config.json")
            return normalise(fields, family.name, family.rules, generation)
    expected = f"model_type out of {', '.join(SUPPORTED_MODEL_TYPES)} (or one of them as text_config)"
    raise UnsupportedError(f"{where}: model_type", expected, repr(model_type)[:200])


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The layers of a configuration that `read_config` made."""
    return next(family for family in FAMILIES if family.name == config.family).spec(config)
