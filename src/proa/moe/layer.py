"""The mixture-of-experts layer: router, routed experts, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.layers.mlp import Activation, GatedMLP, MlpNames, load_mlp
from proa.layers.parameters import ParameterReader
from proa.layers.workspace import Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.router import Router, RouterSpec, TopK
from proa.moe.strategies import arrivals, create_strategy
from proa.moe.strategy import ExpertStrategy, LayerContext
from proa.moe.traffic import ExpertTraffic

__all__ = ["MoeLayer", "MoeRows", "MoeSpec"]


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Shapes and tensor names of the MoE layers; `shared_intermediate` 0: no shared experts.

    Tensors: `{block}.gate`, `{block}.experts.{e}.{names}` and `{block}.shared_experts.{names}` below the layer prefix.
    """

    hidden: int
    intermediate: int
    router: RouterSpec
    activation: Activation
    shared_intermediate: int
    block: str
    names: MlpNames


class MoeRows:
    """Scratch of T tokens, shared by all MoE layers."""

    __slots__ = ("logits", "topk")

    def __init__(self, spec: MoeSpec, workspace: Workspace, tokens: int) -> None:
        top_k = spec.router.top_k
        self.logits = workspace.rows("moe.logits", tokens, spec.router.num_experts)
        self.topk = TopK(
            workspace.rows("moe.ids", tokens, top_k, dtype=torch.int32), workspace.rows("moe.weights", tokens, top_k)
        )


class MoeLayer:
    """`out` = sum of the routed experts + the shared experts."""

    __slots__ = ("_layer", "_nbytes", "_router", "_shared", "_strategy")

    def __init__(
        self, layer: int, router: Router, strategy: ExpertStrategy, shared: GatedMLP | None, *, nbytes: int
    ) -> None:
        self._layer = layer
        self._router = router
        self._strategy = strategy
        self._shared = shared
        self._nbytes = nbytes

    @classmethod
    def load(
        cls,
        reader: ParameterReader,
        prefix: str,
        spec: MoeSpec,
        layer: int,
        workspace: Workspace,
        counts: torch.Tensor | None = None,
    ) -> MoeLayer:
        """Reads the router, all experts and the shared experts below `prefix`, e.g. `model.layers.3`.

        `counts`: see `Router.load`.
        """
        block = f"{prefix}.{spec.block}"
        router = Router.load(reader, f"{block}.gate", spec.router, hidden=spec.hidden, counts=counts)
        arriving = arrivals(workspace, spec.router.num_experts, spec.router.top_k)
        experts = CpuExperts.load(
            reader,
            f"{block}.experts",
            spec.names,
            num_experts=spec.router.num_experts,
            hidden=spec.hidden,
            intermediate=spec.intermediate,
            activation=spec.activation,
            workspace=workspace,
            max_top_k=spec.router.top_k,
            told=None if arriving is None else arriving.told,
            most_in_ram=None if arriving is None else arriving.most_in_ram,
        )
        shared = None
        if spec.shared_intermediate:
            shared = load_mlp(
                reader,
                f"{block}.shared_experts",
                workspace,
                hidden=spec.hidden,
                intermediate=spec.shared_intermediate,
                activation=spec.activation,
                names=spec.names,
            )
        nbytes = router.nbytes + experts.nbytes + (0 if shared is None else shared.nbytes)
        return cls(layer, router, create_strategy(experts, workspace, spec.router.top_k), shared, nbytes=nbytes)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def is_capturable(self) -> bool:
        """Whether a forward of few tokens can be part of a CUDA graph."""
        return self._strategy.is_capturable

    @property
    def traffic(self) -> ExpertTraffic:
        """Of the routed experts; shared experts are not counted."""
        return self._strategy.traffic

    def forward(self, x: torch.Tensor, rows: MoeRows, out: torch.Tensor, *, defers: bool = False) -> None:
        """`x`, `out` float32 `[T, hidden]`. `defers`: see `LayerContext`."""
        self._router.forward(x, rows.logits, rows.topk)
        ctx = LayerContext(self._layer, out, defers)
        self._strategy.submit(x, rows.topk, ctx)
        if self._shared is not None:
            self._shared.forward(x, out, accumulate=True)
        self._strategy.finish(x, rows.topk, ctx)
