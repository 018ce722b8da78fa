"""The choice of a layer's strategy: where its experts lie and the trunk computes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from proa.layers.workspace import Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.deferral import DeferralPlan
from proa.moe.gpu_experts import ExpertArena, GpuExperts
from proa.moe.hybrid import HybridDecode, HybridShared
from proa.moe.offloaded import OffloadedExperts
from proa.moe.router import TopK
from proa.moe.strategy import AllCpu, ExpertStrategy, LayerContext
from proa.moe.traffic import ExpertTraffic
from proa.native import _C

__all__ = ["ByTokens", "create_strategy"]

_log = logging.getLogger("proa.moe")

# The largest batch of a decode step that is captured as a graph (engine.config).
MAX_FEW_TOKENS = 256
MAX_LAYERS = 512


def create_strategy(experts: CpuExperts, workspace: Workspace, max_top_k: int) -> ExpertStrategy:
    """For a layer whose experts are all in CPU memory and whose trunk runs on the device of `workspace`."""
    if workspace.device.name == "cpu":
        return AllCpu(experts)
    offloaded = OffloadedExperts(experts, workspace)
    if workspace.device.torch_device.type != "cuda":
        return offloaded
    hybrid = workspace.shared("experts.hybrid", lambda: _Hybrid.create(experts, workspace, max_top_k))
    return offloaded if hybrid is None else ByTokens(hybrid.add(experts), offloaded, hybrid.max_tokens)


class ByTokens:
    """Few tokens are handed over from inside a CUDA graph, for many Python waits and may give a forward up."""

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


class _Hybrid:
    """What the layers' `HybridDecode`s share, and the layers made so far."""

    def __init__(self, shared: HybridShared, driver: _C.CudaDriver, device: torch.device, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._shared = shared
        self._driver = driver
        self._device = device
        self._layers: list[HybridDecode] = []

    @classmethod
    def create(cls, experts: CpuExperts, workspace: Workspace, max_top_k: int) -> _Hybrid | None:
        """None, with a line in the log, where the driver cannot hand over."""
        try:
            driver = _C.CudaDriver()
        except (_C.CudaMissing, _C.CudaError) as error:
            _log.warning("experts are waited for in Python, without CUDA graphs: %s", error)
            return None
        device, runtime = workspace.device.torch_device, workspace.device.runtime
        worker = _C.StreamWorker(driver, runtime.pool, runtime.cpus[0], max_jobs=2 * MAX_LAYERS)
        tokens = min(MAX_FEW_TOKENS, workspace.max_tokens)
        plan = DeferralPlan((0,) * MAX_LAYERS)
        shared = HybridShared.create(worker, plan, device, tokens, experts.hidden, max_top_k)
        return cls(shared, driver, device, tokens)

    def add(self, experts: CpuExperts) -> HybridDecode:
        """Of the next MoE layer."""
        layer = experts.layer
        arena = ExpertArena(self._device, sum(layer.linear_bytes), 0)
        gpu = GpuExperts(arena, layer.num_experts, layer.linear_bytes, _no_experts, self._driver)
        previous = self._layers[-1] if self._layers else None
        self._layers.append(HybridDecode(len(self._layers), layer, gpu, self._shared, previous))
        return self._layers[-1]


def _no_experts(*_: Any, **__: Any) -> None:
    raise AssertionError("no expert is on the GPU")
