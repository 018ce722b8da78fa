"""The routed experts of one layer in CPU memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from proa.layers.mlp import Activation, MlpNames, load_experts
from proa.layers.parameters import ParameterReader
from proa.layers.workspace import Workspace
from proa.moe.router import TopK
from proa.moe.traffic import ExpertTraffic
from proa.native import _C
from proa.native.ops import ExpertLayer

__all__ = ["CpuExperts", "expert_scratch_bytes"]

# Formats whose kernels take most: one with activations in int8, one in more.
_KINDS = ("int4_g32", "bf16")


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
        told: Callable[[CpuExperts, int], None] | None = None,
        most_in_ram: int | None = None,
    ) -> CpuExperts:
        """Reads `{prefix}.{expert}.{gate,up,down}` of every expert.

        `told` of each that is packed, which it may drop; with it no more than `most_in_ram` are in RAM at a time.
        """
        reader.expect_experts(prefix, num_experts)

        def packed(layer: ExpertLayer, expert: int) -> None:
            if told is not None:
                told(cls(layer, hidden, intermediate, activation), expert)

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
            packed=packed,
            most_in_ram=most_in_ram,
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


@lru_cache(maxsize=256)
def expert_scratch_bytes(
    max_tokens: int, hidden: int, widths: tuple[tuple[int, int], ...], num_threads: int | None = None
) -> int:
    """At most what expert layers that share their scratch take on this machine, for up to `max_tokens` tokens.

    `widths`: width of the intermediate (0: no such layer) and experts of a token, of each kind of layer.
    """
    count = num_threads or len(_C.cpu_info()["physical_cpus"])
    workers = _C.worker_cpus(count)
    pool = _C.ThreadPool([cpu for cpu, _ in workers], [node for _, node in workers])
    try:
        sizes = []
        for kind in _KINDS:
            workspace = _C.ExpertWorkspace(pool, max_tokens)
            # A layer without experts: it takes no memory but asks for its scratch.
            for width, top_k in widths:
                if width:
                    _C.ExpertLayer(workspace, 1, hidden, _padded(width, kind), kind, max_top_k=top_k)
            sizes.append(workspace.nbytes)
        return max(sizes)
    finally:
        pool.close()


def _padded(width: int, kind: str) -> int:
    group = 32 if kind == "int4_g32" else 1
    return -(-width // group) * group
