"""Model families on the shared decoder."""

from __future__ import annotations

from proa.models.expert_method import check_expert_method
from proa.models.gguf_source import open_gguf_experts
from proa.models.loader import Model, ModelInfo, inspect, load_model, packed_bytes

__all__ = [
    "Model",
    "ModelInfo",
    "check_expert_method",
    "inspect",
    "load_model",
    "open_gguf_experts",
    "packed_bytes",
]
