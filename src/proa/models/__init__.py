"""Model families on the shared decoder."""

from __future__ import annotations

from proa.models.loader import Model, ModelInfo, inspect, load_model

__all__ = ["Model", "ModelInfo", "inspect", "load_model"]
