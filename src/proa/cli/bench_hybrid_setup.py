"""The layers of `proa bench hybrid` in memory: random experts in RAM and on the GPU, pinned, with their strategies."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from proa.cli.bench_experts_data import random_experts
from proa.cli.bench_hybrid_spec import MAX_BATCH, HybridSpec
from proa.cli.bench_hybrid_trunk import TrunkLayer
from proa.core.errors import UnsupportedError
from proa.moe.deferral import DeferralPlan
from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertArena, ExpertCompute, GpuExperts, stream_handle
from proa.moe.hybrid import HybridDecode, HybridShared
from proa.moe.prefill_plan import PrefillRates
from proa.moe.router import TopK
from proa.moe.stream import WeightStream
from proa.moe.streamed_prefill import PrefillPass, StreamedPrefill
from proa.native import _C
from proa.native.runtime import CpuRuntime

__all__ = ["HybridStack", "grouped_compute", "host_bytes"]

MOVES = 16  # experts that change places at a time
PIN_THREADS = 8


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """CPU memory as uint8; it must outlive the tensor."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))


def grouped_compute(spec: HybridSpec, device: torch.device) -> ExpertCompute:
    """The Triton kernels of routed experts."""
    from proa.kernels.experts import ExpertFormat, ExpertScratch, grouped_experts

    dims, name = spec.experts.dims, spec.experts.method.format
    fmt = ExpertFormat(dims.hidden, dims.intermediate, name, name)
    scratch = ExpertScratch(max((MAX_BATCH, *spec.prompts)), dims.top_k, dims.experts, fmt, device)

    def compute(
        x: torch.Tensor, topk: TopK, arena: torch.Tensor, table: torch.Tensor, out: torch.Tensor, accumulate: bool
    ) -> None:
        grouped_experts(x, topk.ids, topk.weights, arena, table, fmt, out, scratch, accumulate=accumulate)

    return compute


class HybridStack:
    """Everything that is measured, built once. `timings`: of building it."""

    def __init__(
        self,
        spec: HybridSpec,
        *,
        hand_over: str = "memory",
        library: str = "libcuda.so.1",
        compute: Callable[[HybridSpec, torch.device], ExpertCompute] = grouped_compute,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`library` and `compute`: tests run without a GPU.

        Raises:
            UnsupportedError: this machine has no CUDA driver.
        """
        self.spec = spec
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.driver = _C.CudaDriver(library)
        except _C.CudaMissing as error:
            raise UnsupportedError("bench hybrid", "a CUDA GPU", error) from error
        self.timings: dict[str, Any] = {}
        dims, name = spec.experts.dims, spec.experts.method.format
        shapes = [(dims.intermediate, dims.hidden)] * 2 + [(dims.hidden, dims.intermediate)]
        gate, up, down = (_C.packed_bytes(name, *shape) for shape in shapes)
        self.sizes = (gate, up, down)
        # A core is left to the thread that launches.
        physical = len(_C.cpu_info()["physical_cpus"])
        self.runtime = CpuRuntime(spec.experts.threads or max(1, physical - 1))
        self.workspace = _C.ExpertWorkspace(self.runtime.pool, max((MAX_BATCH, *spec.prompts)))
        progress("experts into memory")
        self.layers = self._fill()
        progress("pinning them")
        self._pin()
        progress("the GPU's part")
        self.trunk = [TrunkLayer(spec.trunk, dims.hidden, self.device) for _ in self.layers]
        self.compute = compute(spec, self.device)
        slots = max(1, spec.layers * spec.gpu_experts + MOVES * (spec.gpu_experts > 0))
        self.arena = ExpertArena(self.device, sum(self.sizes), slots)
        self.gpus = [
            GpuExperts(self.arena, dims.experts, self.sizes, self.compute, self.driver, movable=spec.gpu_experts > 0)
            for _ in self.layers
        ]
        self._strategies(hand_over)
        self.rates: PrefillRates | None = None  # once they are measured

    def _fill(self) -> list[_C.ExpertLayer]:
        """All experts of a layer have the bytes of a few: speed depends on where they lie."""
        spec, dims = self.spec, self.spec.experts.dims
        sample = self._empty_layer()
        variants = random_experts(spec.experts)
        for expert, raw in enumerate(variants):
            sample.load(expert, raw.gate, raw.up, raw.down)
        sources = [[host_bytes(*block) for block in sample.blocks(e)] for e in range(len(variants))]
        start = time.perf_counter()
        torch.set_num_threads(self.runtime.num_threads)
        layers = []
        for _ in range(spec.layers):
            layer = self._empty_layer()
            for expert in range(dims.experts):
                layer.reserve(expert)
                source = sources[expert % len(sources)]
                for block, values in zip(layer.blocks(expert), source, strict=True):
                    host_bytes(*block).copy_(values)
                layer.commit(expert)
            layers.append(layer)
        torch.set_num_threads(1)
        self.timings["fill_gb_per_s"] = sum(layer.nbytes for layer in layers) / 1e9 / (time.perf_counter() - start)
        return layers

    def _empty_layer(self) -> _C.ExpertLayer:
        dims = self.spec.experts.dims
        return _C.ExpertLayer(
            self.workspace,
            dims.experts,
            dims.hidden,
            dims.intermediate,
            self.spec.experts.method.format,
            max_top_k=dims.top_k,
        )

    def _pin(self) -> None:
        """Once: a range per layer and node, as a copy may not cross two."""
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device)  # a context
        self._pinned = ranges = [memory for layer in self.layers for memory in layer.used_memory]
        start = time.perf_counter()
        self.driver.pin(ranges, PIN_THREADS)
        self.timings["pin_gb_per_s"] = sum(size for _, size in ranges) / 1e9 / (time.perf_counter() - start)

    def _strategies(self, hand_over: str) -> None:
        spec, dims = self.spec, self.spec.experts.dims
        cpu = self.runtime.cpus[0]
        self.worker = _C.StreamWorker(self.driver, self.runtime.pool, cpu, hand_over, 4 * spec.layers)  # type: ignore[arg-type]
        plan = DeferralPlan.create(spec.layers, dims.top_k, spec.deferred)
        shared = HybridShared.create(self.worker, plan, self.device, MAX_BATCH, dims.hidden, dims.top_k)
        self.exchange = shared.exchange(0)
        self.decode: list[HybridDecode] = []
        for i, (layer, gpu) in enumerate(zip(self.layers, self.gpus, strict=True)):
            self.decode.append(HybridDecode(i, layer, gpu, shared, self.decode[-1] if self.decode else None))
        expert_bytes = sum(self.sizes)
        part = min(spec.part_experts, dims.experts) * expert_bytes
        self.stream = WeightStream(self.device, self.driver, part, spec.parts)
        rows = max((MAX_BATCH, *spec.prompts))
        self.shared_pass = PrefillPass(
            self.stream, self.worker, ExpertExchange(self.device, rows, dims.hidden, dims.top_k), self.compute
        )
        self.prefill = [StreamedPrefill(*pair, self.shared_pass) for pair in zip(self.layers, self.gpus, strict=True)]

    def move_to_gpu(self) -> None:
        """The first `gpu_experts` of each layer leave RAM; what was pinned stays pinned."""
        stream = stream_handle(self.device)
        for layer, gpu in zip(self.layers, self.gpus, strict=True):
            for expert in range(self.spec.gpu_experts):
                gpu.begin(expert, layer.blocks(expert), stream)
                gpu.commit(expert)
        self.synchronize()
        for layer in self.layers:
            for expert in range(self.spec.gpu_experts):
                layer.drop(expert)

    @property
    def cpu_seconds(self) -> float:
        """That the CPU's experts have taken since the start."""
        return sum(layer.seconds for layer in self.layers)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self.worker.close()
        for start, _ in self._pinned:
            self.driver.unpin(start)
        self.runtime.close()
