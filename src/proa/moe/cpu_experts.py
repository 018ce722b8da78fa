"""The routed experts of one layer in CPU memory."""

from __future__ import annotations

import torch

from proa.layers.mlp import Activation, MlpNames, load_experts
from proa.layers.parameters import ParameterReader
from proa.layers.workspace import Workspace
from proa.moe.router import TopK
from proa.moe.traffic import ExpertTraffic
from proa.native.ops import ExpertLayer

__all__ = ["CpuExperts"]


class CpuExperts:
    """All experts of one layer, packed in one native layer."""

    __slots__ = ("activation", "hidden", "intermediate", "layer")

    def __init__(self, layer: ExpertLayer, hidden: int, intermediate: int, activation: Activation) -> None:
        self.layer = layer
        self.hidden = hidden
        self.intermediate = intermediate
        self.activation = activation

    @classmethod
    def load(
        cls,
        reader: ParameterReader,
        prefix: str,
        names: MlpNames,
        *,
        num_experts: int,
        hidden: int,
        intermediate: int,
        activation: Activation,
        workspace: Workspace,
        max_top_k: int,
    ) -> CpuExperts:
        """Reads `{prefix}.{expert}.{gate,up,down}` of every expert."""
        reader.expect_experts(prefix, num_experts)
        prefixes = [f"{prefix}.{expert}" for expert in range(num_experts)]
        layer = load_experts(
            reader,
            prefixes,
            names,
            hidden=hidden,
            intermediate=intermediate,
            activation=activation,
            workspace=workspace,
            max_top_k=max_top_k,
        )
        return cls(layer, hidden, intermediate, activation)

    @property
    def nbytes(self) -> int:
        return int(self.layer.nbytes)

    @property
    def traffic(self) -> ExpertTraffic:
        return ExpertTraffic(self.layer.bytes_read, self.layer.seconds)

    def forward(self, x: torch.Tensor, topk: TopK, out: torch.Tensor) -> None:
        """`x`, `out` float32 `[T, hidden]`; a slot whose id is -1 adds nothing."""
        self.layer.forward(x, topk.ids, topk.weights, out)
