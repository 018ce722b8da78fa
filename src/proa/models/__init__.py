"""Model families on the shared decoder."""

from __future__ import annotations

from proa.layers.workspace import ExpertPlan
from proa.models.decode_graph import DecodeGraphs
from proa.models.expert_method import check_expert_method
from proa.models.expert_sources import expert_layout, open_experts
from proa.models.gpu_expert_formats import check_gpu_experts
from proa.models.loader import Model, load_model
from proa.models.needs import ExpertInfo, GpuBytes, ModelInfo, ModelNeeds, inspect, model_needs

__all__ = [
    "DecodeGraphs",
    "ExpertInfo",
    "ExpertPlan",
    "GpuBytes",
    "Model",
    "ModelInfo",
    "ModelNeeds",
    "check_expert_method",
    "check_gpu_experts",
    "expert_layout",
    "inspect",
    "load_model",
    "model_needs",
    "open_experts",
]
