"""The choice of a layer's strategy: where its experts lie and the trunk computes."""

from __future__ import annotations

from proa.layers.workspace import Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.offloaded import OffloadedExperts
from proa.moe.strategy import AllCpu, ExpertStrategy

__all__ = ["create_strategy"]


def create_strategy(experts: CpuExperts, workspace: Workspace) -> ExpertStrategy:
    """For a layer whose experts are all in CPU memory and whose trunk runs on the device of `workspace`."""
    return AllCpu(experts) if workspace.device.name == "cpu" else OffloadedExperts(experts, workspace)
