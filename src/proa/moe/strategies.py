"""The choice of a layer's strategy: where its experts lie and the trunk computes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from proa.core.errors import UnsupportedError
from proa.layers.workspace import Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.deferral import DeferralPlan
from proa.moe.gpu_experts import ExpertArena, ExpertCompute, GpuExperts, stream_handle
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
    """For a layer whose experts are all in CPU memory and whose trunk runs on the device of `workspace`.

    Experts that `workspace.experts_on_gpu` names leave CPU memory. Layers come in order.

    Raises:
        UnsupportedError: experts are to go to a GPU that cannot hand over to the CPU, or in a format its kernels lack.
    """
    if workspace.device.name == "cpu":
        return AllCpu(experts)
    offloaded = OffloadedExperts(experts, workspace)
    if workspace.device.torch_device.type != "cuda":
        return offloaded
    hybrid = workspace.shared("experts.hybrid", lambda: _Hybrid.create(experts, workspace, max_top_k))
    if hybrid is None:
        return offloaded
    few = hybrid.add(experts)
    # Experts on the GPU are missing from what `OffloadedExperts` computes.
    return few if hybrid.has_gpu_experts else ByTokens(few, offloaded, hybrid.max_tokens)


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

    def __init__(self, shared: HybridShared, driver: _C.CudaDriver, workspace: Workspace, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._shared = shared
        self._driver = driver
        self._workspace = workspace
        self._layers: list[HybridDecode] = []

    @property
    def has_gpu_experts(self) -> bool:
        return self._workspace.experts_on_gpu is not None

    @classmethod
    def create(cls, experts: CpuExperts, workspace: Workspace, max_top_k: int) -> _Hybrid | None:
        """None, with a line in the log, where the driver cannot hand over."""
        try:
            driver = _C.CudaDriver()
        except (_C.CudaMissing, _C.CudaError) as error:
            if workspace.experts_on_gpu is not None:
                raise UnsupportedError("GPU experts", "a CUDA driver that hands over", error) from error
            _log.warning("experts are waited for in Python, without CUDA graphs: %s", error)
            return None
        device, runtime = workspace.device.torch_device, workspace.device.runtime
        worker = _C.StreamWorker(driver, runtime.pool, runtime.cpus[0], max_jobs=2 * MAX_LAYERS)
        tokens = workspace.max_tokens
        if workspace.experts_on_gpu is None:
            tokens = min(MAX_FEW_TOKENS, tokens)
        plan = DeferralPlan((0,) * MAX_LAYERS)
        shared = HybridShared.create(worker, plan, device, tokens, experts.hidden, max_top_k)
        return cls(shared, driver, workspace, tokens)

    def add(self, experts: CpuExperts) -> HybridDecode:
        """Of the next MoE layer; its experts on the GPU are copied there."""
        layer, index = experts.layer, len(self._layers)
        gpu = self._gpu_experts(experts)
        if self._workspace.experts_on_gpu is not None:
            for expert in np.flatnonzero(self._workspace.experts_on_gpu[index]).tolist():
                gpu.begin(expert, layer.blocks(expert), stream_handle(self._workspace.device.torch_device))
                gpu.commit(expert)
            torch.cuda.synchronize(self._workspace.device.torch_device)
            for expert in gpu.experts:
                layer.drop(expert)
            layer.release_memory()
        previous = self._layers[-1] if self._layers else None
        self._layers.append(HybridDecode(index, layer, gpu, self._shared, previous, waits_above=MAX_FEW_TOKENS))
        return self._layers[-1]

    def _gpu_experts(self, experts: CpuExperts) -> GpuExperts:
        layer, workspace = experts.layer, self._workspace
        placed, device = workspace.experts_on_gpu, workspace.device.torch_device
        count = 0 if placed is None else int(placed.sum())
        arena = workspace.shared("experts.arena", lambda: ExpertArena(device, sum(layer.linear_bytes), count))
        compute: ExpertCompute = _no_experts
        if count:
            if layer.has_bias:
                raise UnsupportedError("GPU experts", "experts without biases", "biases", "leave all on the CPU")
            compute = self._grouped(experts)
        return GpuExperts(arena, layer.num_experts, layer.linear_bytes, compute, self._driver)

    def _grouped(self, experts: CpuExperts) -> ExpertCompute:
        from proa.kernels.experts import ExpertFormat, ExpertScratch  # slow to import
        from proa.moe.grouped import GroupedCompute

        (gate_up, down), activation = experts.layer.formats, experts.activation
        fmt = ExpertFormat(
            experts.hidden, experts.intermediate, gate_up, down, activation.gating, activation.limit, activation.alpha
        )
        tokens, top_k, device = self.max_tokens, self._shared.top_k, self._workspace.device.torch_device
        scratch = self._workspace.shared(
            "experts.scratch", lambda: ExpertScratch(tokens, top_k, experts.layer.num_experts, fmt, device)
        )
        return GroupedCompute(fmt, scratch)


def _no_experts(*_: Any, **__: Any) -> None:
    raise AssertionError("no expert is on the GPU")
