"""Model families on the shared decoder."""

from __future__ import annotations

from proa.models.gguf_source import open_gguf_experts
from proa.models.loader import Model, ModelInfo, inspect, load_model, packed_bytes

__all__ = ["Model", "ModelInfo", "inspect", "load_model", "open_gguf_experts", "packed_bytes"]
