"""Experts in CPU memory under a trunk on the GPU."""

from __future__ import annotations

import torch

from proa.layers.workspace import Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext
from proa.moe.traffic import ExpertTraffic

__all__ = ["OffloadedExperts"]


class OffloadedExperts:
    """Hidden states and routing go to the CPU through pinned memory, the experts' sum comes back.

    The CPU waits for the copy in `finish`; what was queued on the GPU after `submit` runs meanwhile. All layers share
    the pinned rows: a layer's copy to the CPU is queued behind the copy back of the layer before it.
    """

    __slots__ = ("_copied", "_experts", "_workspace")

    is_capturable = False

    def __init__(self, experts: CpuExperts, workspace: Workspace, max_top_k: int) -> None:
        self._experts = experts
        self._workspace = workspace
        # Every prompt's memory is there from the start.
        for rows, dtype in (("ids", torch.int32), ("weights", torch.float32)):
            workspace.host_rows(f"experts.{rows}", workspace.max_tokens, max_top_k, dtype=dtype)
        for name in ("hidden", "result"):
            workspace.host_rows(f"experts.{name}", workspace.max_tokens, experts.hidden)
        workspace.rows("experts.returned", workspace.max_tokens, experts.hidden)
        self._copied: torch.cuda.Event | None = None
        if workspace.device.torch_device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def traffic(self) -> ExpertTraffic:
        return self._experts.traffic

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        hidden, routing, _ = self._host_rows(x, topk)
        hidden.copy_(x, non_blocking=True)
        routing.ids.copy_(topk.ids, non_blocking=True)
        routing.weights.copy_(topk.weights, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        ctx.out.zero_()

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        hidden, routing, result = self._host_rows(x, topk)
        if self._copied is not None:
            self._copied.synchronize()
        self._experts.forward(hidden, routing, result)
        returned = self._workspace.rows("experts.returned", *x.shape)
        returned.copy_(result, non_blocking=True)
        ctx.out.add_(returned)

    def _host_rows(self, x: torch.Tensor, topk: TopK) -> tuple[torch.Tensor, TopK, torch.Tensor]:
        host, (tokens, top_k) = self._workspace.host_rows, topk.ids.shape
        routing = TopK(host("experts.ids", tokens, top_k, dtype=torch.int32), host("experts.weights", tokens, top_k))
        return host("experts.hidden", *x.shape), routing, host("experts.result", *x.shape)
