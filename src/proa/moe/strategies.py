"""The choice of a layer's strategy: where its experts lie and the trunk computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from proa.layers.workspace import Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.gpu_experts import GpuExperts
from proa.moe.hybrid_layers import COPIED_TOGETHER, HYBRID, MAX_FEW_TOKENS, Hybrid
from proa.moe.offloaded import OffloadedExperts
from proa.moe.placement import Placement
from proa.moe.rebalance import RebalanceSpec
from proa.moe.router import TopK
from proa.moe.stats import RoutingCounts
from proa.moe.strategy import AllCpu, ExpertStrategy, LayerContext
from proa.moe.traffic import ExpertTraffic
from proa.moe.updates import ExpertUpdates, UpdateSpec
from proa.moe.usage import ExpertUsage

__all__ = ["AllGpu", "Arrivals", "ByTokens", "arrivals", "create_strategy", "create_usage"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What happens to the experts of a layer while they are loaded: `told` of each that is packed, and no more than
    `most_in_ram` at a time are in RAM.
    """

    told: Callable[[CpuExperts, int], None]
    most_in_ram: int


def arrivals(workspace: Workspace, num_experts: int, max_top_k: int) -> Arrivals | None:
    """Of the next layer; None where all its experts stay in RAM."""
    plan = workspace.expert_plan
    if plan is None or workspace.device.name == "cpu" or not plan.on_gpu.any():
        return None

    def told(experts: CpuExperts, expert: int) -> None:
        hybrid = _hybrid(experts, workspace, max_top_k)
        if hybrid is not None:
            hybrid.arrive(experts, expert)

    first: Hybrid | None = workspace.made(HYBRID)
    on_gpu = int(plan.on_gpu[0 if first is None else first.num_layers].sum())
    return Arrivals(told, num_experts - on_gpu + min(COPIED_TOGETHER, on_gpu))


def _hybrid(experts: CpuExperts, workspace: Workspace, max_top_k: int) -> Hybrid | None:
    return workspace.shared(HYBRID, lambda: Hybrid.create(experts, workspace, max_top_k))


def create_strategy(experts: CpuExperts, workspace: Workspace, max_top_k: int) -> ExpertStrategy:
    """For a layer whose experts are all in CPU memory and whose trunk runs on the device of `workspace`.

    Experts that `workspace.expert_plan` has on the GPU leave CPU memory. Layers come in order.

    Raises:
        UnsupportedError: experts are to run on a GPU that cannot hand over to the CPU, or in a format its kernels lack.
    """
    if workspace.device.name == "cpu":
        return AllCpu(experts)
    hybrid = _hybrid(experts, workspace, max_top_k)
    if hybrid is None:
        return OffloadedExperts(experts, workspace, max_top_k)
    layer = hybrid.add(experts)
    if layer.decode is None:
        return AllGpu(layer.gpu)
    # Experts on the GPU are missing from what `OffloadedExperts` computes.
    if layer.prefill is not None and hybrid.plan.stream_from is not None:
        return ByTokens(layer.decode, layer.prefill, min(hybrid.plan.stream_from - 1, hybrid.max_tokens))
    if not hybrid.plan.on_gpu.any():
        offloaded = OffloadedExperts(experts, workspace, max_top_k)
        return ByTokens(layer.decode, offloaded, min(MAX_FEW_TOKENS, hybrid.max_tokens))
    return layer.decode


def create_usage(counts: RoutingCounts, workspace: Workspace, top_k: int) -> ExpertUsage:
    """Of the layers made so far, whose routers add to `counts`. Experts follow it where the plan has them move."""
    hybrid: Hybrid | None = workspace.made(HYBRID)
    if hybrid is None:
        return ExpertUsage(counts)
    updates = None
    if hybrid.plan.moves:
        spec = UpdateSpec(rebalance=RebalanceSpec(max_swaps=hybrid.plan.moves))
        placement = Placement(hybrid.plan.on_gpu.copy())
        device, shares = workspace.device.torch_device, hybrid.plan.shares
        updates = ExpertUpdates(hybrid.places, placement, top_k, device, spec, shares=shares)
    return ExpertUsage(counts, updates, (lambda: hybrid.num_late) if hybrid.plan.max_deferred else None)


class AllGpu:
    """Every expert on the GPU: nothing is handed over."""

    __slots__ = ("_gpu",)

    is_capturable = True
    traffic = ExpertTraffic()

    def __init__(self, gpu: GpuExperts) -> None:
        self._gpu = gpu

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        self._gpu.forward(x, topk, ctx.out)

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:  # noqa: ARG002  # of the protocol
        """All is queued by `submit`; with many tokens Python waits, so that a forward can be given up in between."""
        if x.shape[0] > MAX_FEW_TOKENS and x.device.type == "cuda":
            torch.cuda.current_stream(x.device).synchronize()


class ByTokens:
    """One strategy for up to `max_few` tokens, which a CUDA graph may hold, another for more."""

    __slots__ = ("_few", "_many", "_max_few")

    is_capturable = True

    def __init__(self, few: ExpertStrategy, many: ExpertStrategy, max_few: int) -> None:
        self._few = few
        self._many = many
        self._max_few = max_few

    @property
    def traffic(self) -> ExpertTraffic:
        """Both run the same experts."""
        return self._many.traffic

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        self._choice(x).submit(x, topk, ctx)

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        self._choice(x).finish(x, topk, ctx)

    def _choice(self, x: torch.Tensor) -> ExpertStrategy:
        return self._few if x.shape[0] <= self._max_few else self._many
