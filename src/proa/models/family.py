"""What makes a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proa.models.config import ConfigRules, ModelConfig
from proa.models.decoder_layer import DecoderSpec

__all__ = ["Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """`model_types`: values of model_type in config.json; `rules`: how to read it; `spec`: the layers it describes."""

    name: str
    model_types: tuple[str, ...]
    rules: ConfigRules
    spec: Callable[[ModelConfig], DecoderSpec]
