"""The layers of a model with experts on CPU and GPU: what they share, and each layer's strategies."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from proa.core.errors import MemoryShortageError, UnsupportedError
from proa.layers.workspace import ExpertPlan, Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.deferral import DeferralPlan
from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertArena, ExpertCompute, GpuExperts, stream_handle
from proa.moe.hybrid import HybridDecode, HybridShared
from proa.moe.mover import ExpertPlaces
from proa.moe.pass_observer import PassObserver
from proa.moe.prefill_plan import ExpertSize, LayerPlan
from proa.moe.prefill_planner import PrefillPlanner
from proa.moe.prefill_rates import measure_rates
from proa.moe.stream import WeightStream
from proa.moe.streamed_prefill import PrefillPass, StreamedPrefill, SuspendedPass
from proa.moe.traffic import HybridTraffic
from proa.native import _C
from proa.native.ops import ExpertLayer

__all__ = ["HYBRID", "MAX_FEW_TOKENS", "PINNING_FIX", "Hybrid", "HybridLayer", "hybrid_of", "max_cpu_tokens"]

_log = logging.getLogger("proa.moe")

# The largest batch of a decode step that is captured as a graph (engine.config).
MAX_FEW_TOKENS = 256
MAX_LAYERS = 512
HYBRID = "experts.hybrid"  # its name in a workspace
RING_PARTS = 4
PIN_THREADS = 8
PINNING_FIX = (
    "raise what limits pinned memory (a container's, WSL's), or use --gpu-prefill-threshold 0 without --expert-updates"
)
# Tokens of a streamed chunk that the CPU gets at a time.
PASS_ROWS = 4096
# Experts on their way to the GPU while a layer is loaded: RAM holds so many beside those that stay.
COPIED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """`decode`: None where all experts are on the GPU for good; `prefill`: unless experts stream through it."""

    cpu: CpuExperts
    gpu: GpuExperts
    decode: HybridDecode | None
    prefill: StreamedPrefill | None

    @property
    def slots(self) -> tuple[int, int]:
        """As `HybridDecode.slots`; where nothing is handed over nothing is counted, and one of one stands for all."""
        return (1, 1) if self.decode is None else self.decode.slots


class Hybrid:
    """What the layers share, and the layers made so far.

    `max_tokens`: of a forward whose tokens are handed to the CPU.
    """

    def __init__(self, workspace: Workspace, plan: ExpertPlan, driver: _C.CudaDriver, top_k: int, hidden: int) -> None:
        self.plan = plan
        self.max_tokens = workspace.max_tokens
        if plan.stream_from is not None:
            self.max_tokens = min(max(MAX_FEW_TOKENS, plan.stream_from - 1), self.max_tokens)
        elif not plan.on_gpu.any():
            self.max_tokens = min(MAX_FEW_TOKENS, self.max_tokens)
        self._workspace = workspace
        self._device = workspace.device.torch_device
        self._driver = driver
        self._top_k = top_k
        runtime = workspace.device.runtime
        self._worker = _C.StreamWorker(driver, runtime.pool, runtime.cpus[0], max_jobs=2 * MAX_LAYERS)
        late = DeferralPlan.create(len(plan.on_gpu), top_k, plan.max_deferred)
        self._shared: HybridShared | None = None
        if plan.uses_cpu:
            self._shared = HybridShared.create(self._worker, late, self._device, self.max_tokens, hidden, top_k)
        self._layers: list[HybridLayer] = []
        self._arriving: GpuExperts | None = None  # of the layer that is being loaded
        self._copied: list[int] = []  # of its experts, since they were last waited for
        self._arena: ExpertArena | None = None
        self._pass: PrefillPass | None = None
        self._planner: PrefillPlanner | None = None
        self._streams: list[bool] = []  # of each layer: its experts may cross the bus
        self.last_has_few = False  # tokens of a pass: those that are drawn from
        self._scratch: Any = None
        self._pinned: list[int] = []
        self._pinned_bytes = 0
        # The layers are kept until then. At the end of the process the system lets go of everything.
        weakref.finalize(self, _unpin, driver, self._pinned).atexit = False

    @classmethod
    def create(cls, experts: CpuExperts, workspace: Workspace, max_top_k: int) -> Hybrid | None:
        """None without a CUDA device, and, with a line in the log, where its driver cannot hand over."""
        if workspace.device.torch_device.type != "cuda":
            return None
        plan = workspace.expert_plan or ExpertPlan(np.zeros((MAX_LAYERS, experts.layer.num_experts), np.bool_))
        try:
            driver = _C.CudaDriver()
        except (_C.CudaMissing, _C.CudaError) as error:
            if plan.on_gpu.any() or plan.stream_all:
                raise UnsupportedError("GPU experts", "a CUDA driver that hands over", error) from error
            _log.warning("experts are waited for in Python, without CUDA graphs: %s", error)
            return None
        return cls(workspace, plan, driver, max_top_k, experts.hidden)

    def add(self, experts: CpuExperts) -> HybridLayer:
        """The next MoE layer; its experts on the GPU are copied there, the others pinned if they are to stream."""
        index = len(self._layers)
        self._let_go(experts.layer)
        for expert in np.flatnonzero(self.plan.on_gpu[index]).tolist():
            if experts.layer.is_loaded(expert):
                self.arrive(experts, expert)
        self._let_go(experts.layer)
        gpu, self._arriving = self._arriving or self._gpu_experts(experts), None
        self._keep_memory(experts, self.plan.ram_slots if self.plan.moves else 0)
        decode = None
        if self._shared is not None:
            previous = self._layers[-1].decode if self._layers else None
            decode = HybridDecode(index, experts.layer, gpu, self._shared, previous, waits_above=MAX_FEW_TOKENS)
        self._layers.append(HybridLayer(experts, gpu, decode, self._prefill(experts, gpu)))
        return self._layers[-1]

    def arrive(self, experts: CpuExperts, expert: int) -> None:
        """An expert of the next layer is in RAM: one for the GPU goes there, and its memory is for those to come."""
        if not self.plan.on_gpu[len(self._layers)][expert]:
            return
        if self._arriving is None:
            self._arriving = self._gpu_experts(experts)
        self._arriving.begin(expert, experts.layer.blocks(expert), stream_handle(self._device))
        self._arriving.commit(expert)
        self._copied.append(expert)
        if len(self._copied) == COPIED_TOGETHER:
            self._let_go(experts.layer)

    @property
    def num_layers(self) -> int:
        """Made so far."""
        return len(self._layers)

    def _let_go(self, layer: ExpertLayer) -> None:
        if self._copied and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for expert in self._copied:
            layer.drop(expert)
        self._copied.clear()

    @property
    def faults(self) -> int:
        """How many ids the CPU was given of experts it does not have: each is a wrong sum."""
        return self._worker.faults

    def traffic(self) -> HybridTraffic:
        """Of all layers together; cheap, but not for every step."""
        streamed = (0, 0.0) if self._pass is None else self._pass.stream.traffic()
        return HybridTraffic(tuple(layer.slots for layer in self._layers), *streamed)

    def wake(self) -> None:
        """Before a step: a worker that has slept finds what is handed to it up to 2 ms late."""
        self._worker.resume()

    def settle(self) -> None:
        """After a forward that raised between two layers, once the device has nothing to do."""
        self._worker.settle()

    def suspend(self, tokens: int) -> SuspendedPass | None:
        """Before a pass of `tokens` between two layers of another: what `resume` goes on with; None: none streams."""
        streams = self.plan.stream_from is not None and tokens >= self.plan.stream_from
        return self._pass.suspend() if self._pass is not None and streams else None

    def resume(self, suspended: SuspendedPass) -> None:
        """After that pass, whether it was computed or given up."""
        assert self._pass is not None
        self._pass.resume(suspended)

    @property
    def num_late(self) -> int:
        """Slots of tokens whose experts came one layer late so far."""
        return sum(layer.decode.num_late for layer in self._layers if layer.decode is not None)

    @property
    def places(self) -> list[ExpertPlaces]:
        """Of all layers."""
        return [ExpertPlaces(layer.cpu.layer, layer.gpu) for layer in self._layers]

    def _keep_memory(self, experts: CpuExperts, count: int) -> None:
        """Memory of experts that went to the GPU is given back but for `count` slots; what may be copied is pinned."""
        layer = experts.layer
        away = [expert for expert in range(layer.num_experts) if not layer.is_loaded(expert)]
        for expert in away[:count]:
            layer.reserve(expert)
        layer.release_memory()
        if self.plan.stream_from is not None or self.plan.moves:
            self._streams.append(self._pin(layer))
        for expert in away[:count]:
            layer.drop(expert)

    def _pin(self, layer: ExpertLayer) -> bool:
        """Whether the layer's experts can cross the bus: as large as the first layer's, in memory that is pinned."""
        try:
            self._driver.pin(layer.used_memory, PIN_THREADS)
        except _C.CudaError as error:
            if self.plan.stream_all or self.plan.moves:
                needed = sum(nbytes for _, nbytes in layer.used_memory) / 2**30
                got = f"{error} with {self._pinned_bytes / 2**30:.2f} GiB pinned"
                expected = f"{needed:.2f} GiB for a layer's experts"
                raise MemoryShortageError("pinned memory", expected, got, PINNING_FIX) from error
            _log.warning("experts of layer %d stay on the CPU in long prompts: %s", len(self._layers), error)
            return False
        self._pinned += [start for start, _ in layer.used_memory]
        self._pinned_bytes += sum(nbytes for _, nbytes in layer.used_memory)
        return not self._layers or layer.linear_bytes == self._layers[0].cpu.layer.linear_bytes

    def _gpu_experts(self, experts: CpuExperts) -> GpuExperts:
        layer = experts.layer
        if self._arena is None:
            slots = int(self.plan.on_gpu.sum()) + self.plan.moves
            self._arena = ExpertArena(self._device, sum(layer.linear_bytes), slots)
        compute: ExpertCompute = _no_experts
        if self.plan.uses_gpu:
            if layer.has_bias:
                raise UnsupportedError("GPU experts", "experts without biases", "biases", "leave all on the CPU")
            compute = self._grouped(experts)
        movable = self.plan.moves > 0
        return GpuExperts(self._arena, layer.num_experts, layer.linear_bytes, compute, self._driver, movable=movable)

    def _grouped(self, experts: CpuExperts) -> ExpertCompute:
        from proa.kernels.experts import ExpertFormat, ExpertScratch  # slow to import
        from proa.moe.grouped import GroupedCompute, check_grouped

        (gate_up, down), activation = experts.layer.formats, experts.activation
        fmt = ExpertFormat(
            experts.hidden, experts.intermediate, gate_up, down, activation.gating, activation.limit, activation.alpha
        )
        if self._scratch is None:
            tokens, count = self._workspace.max_tokens, experts.layer.num_experts
            self._scratch = ExpertScratch(tokens, self._top_k, count, fmt, self._device)
            check_grouped(self._workspace.device.runtime.pool, fmt, self._device)
        return GroupedCompute(fmt, self._scratch)

    def _prefill(self, experts: CpuExperts, gpu: GpuExperts) -> StreamedPrefill | None:
        if self.plan.stream_from is None:
            return None
        expert_bytes = sum(experts.layer.linear_bytes)
        if self._pass is None:
            part = max(1, self.plan.ring_bytes // RING_PARTS // expert_bytes) * expert_bytes
            stream = WeightStream(self._device, self._driver, part, RING_PARTS)
            rows = min(PASS_ROWS, self._workspace.max_tokens)
            exchange = ExpertExchange(self._device, rows, experts.hidden, self._top_k)
            self._pass = PrefillPass(stream, self._worker, exchange, self._grouped(experts), self._plans)
            self._workspace.when_loaded(self._measure)
        return StreamedPrefill(experts.layer, gpu, self._pass)

    def _measure(self) -> None:
        """Once all layers are there."""
        assert self._pass is not None and self._planner is None
        layers = zip(self._layers, self._streams, strict=True)
        first = next((layer for layer, streams in layers if streams and layer.cpu.layer.nbytes), None)
        if first is None:
            return
        layer, started = first.cpu.layer, time.perf_counter()
        size = ExpertSize(first.cpu.hidden, first.cpu.intermediate, sum(layer.linear_bytes))
        with torch.no_grad():
            rates = measure_rates(
                layer,
                size,
                self._pass.stream,
                self._driver,
                self._pass.compute,
                self._pass.exchange,
                top_k=self._top_k,
                max_tokens=self._workspace.max_tokens,
            )
            self._planner = PrefillPlanner(
                rates,
                size,
                layers=len(self._layers),
                experts=layer.num_experts,
                top_k=self._top_k,
                device=self._device,
                stream_all_from=self.plan.stream_from if self.plan.stream_all else None,
            )
        if not self.plan.stream_all:
            self._pass.observer = PassObserver(self._planner, self._device)
        _log.info("measured in %.1f s: %s", time.perf_counter() - started, rates)

    def _plans(self, tokens: int) -> Sequence[LayerPlan]:
        """Of a chunk."""
        on_gpu = [
            np.array([not layer.cpu.layer.is_loaded(expert) for expert in range(layer.cpu.layer.num_experts)])
            for layer in self._layers
        ]
        if self._planner is None:  # nothing can cross
            return [LayerPlan((), tuple(np.flatnonzero(~here).tolist())) for here in on_gpu]
        streams = [*self._streams[:-1], self._streams[-1] and not self.last_has_few]
        return self._planner.plans(tokens, on_gpu, streams)


def max_cpu_tokens(plan: ExpertPlan, max_tokens: int) -> int:
    """Most tokens whose experts the CPU computes at a time, in forwards of up to `max_tokens`."""
    if not plan.uses_cpu:
        return 1  # none, but layers that hold no experts have a scratch of some size
    if plan.stream_from is None:
        return max_tokens
    return min(max(MAX_FEW_TOKENS, plan.stream_from - 1, PASS_ROWS), max_tokens)


def hybrid_of(workspace: Workspace) -> Hybrid | None:
    """What the layers of `workspace` share; None where no expert is handed over."""
    return cast("Hybrid | None", workspace.made(HYBRID))


def _unpin(driver: _C.CudaDriver, starts: list[int]) -> None:
    for start in starts:
        driver.unpin(start)


def _no_experts(*_: Any, **__: Any) -> None:
    raise AssertionError("no expert is on the GPU")
