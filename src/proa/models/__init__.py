"""Model families on the shared decoder."""

from __future__ import annotations

from proa.layers.workspace import ExpertPlan
from proa.models.decode_graph import DecodeGraphs
from proa.models.expert_method import check_expert_method
from proa.models.expert_sources import expert_layout, open_experts
from proa.models.gpu_expert_formats import check_gpu_experts
from proa.models.loader import (
    ExpertInfo,
    GpuBytes,
    Model,
    ModelInfo,
    gpu_bytes,
    inspect,
    load_model,
    packed_bytes,
    scratch_bytes,
)

__all__ = [
    "DecodeGraphs",
    "ExpertInfo",
    "ExpertPlan",
    "GpuBytes",
    "Model",
    "ModelInfo",
    "check_expert_method",
    "check_gpu_experts",
    "expert_layout",
    "gpu_bytes",
    "inspect",
    "load_model",
    "open_experts",
    "packed_bytes",
    "scratch_bytes",
]
