"""Prefill of a long chunk: one pass of the experts over the GPU, the CPU working beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertCompute, GpuExperts, stream_handle
from proa.moe.prefill_plan import LayerPlan
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext
from proa.moe.stream import WeightStream, make_groups
from proa.moe.traffic import ExpertTraffic
from proa.native._C import StreamWorker
from proa.native.ops import ExpertLayer

__all__ = ["PrefillPass", "StreamedPrefill"]


@dataclass(frozen=True, slots=True)
class _Layer:
    cpu: ExpertLayer
    gpu: GpuExperts
    job: int


class PrefillPass:
    """What the layers of a model share: the stream of experts, tokens for the CPU's, and the plan of a chunk.

    The experts of all layers have one format and size. `planner`: plans a chunk of so many tokens when its first layer
    comes to it, for who does not call `begin`; with one, Python waits for every layer, so that a chunk may be given up
    between layers.
    """

    __slots__ = ("_layers", "_others", "_plans", "compute", "exchange", "planner", "stream", "worker")

    def __init__(
        self,
        stream: WeightStream,
        worker: StreamWorker,
        exchange: ExpertExchange,
        compute: ExpertCompute,
        planner: Callable[[int], Sequence[LayerPlan]] | None = None,
    ) -> None:
        self.stream = stream
        self.worker = worker
        self.exchange = exchange
        self.compute = compute
        self.planner = planner
        self._layers: list[_Layer] = []
        self._plans: Sequence[LayerPlan] = ()
        self._others = torch.empty(0)

    def add(self, cpu: ExpertLayer, gpu: GpuExperts) -> int:
        """The next MoE layer's number."""
        own = self.exchange
        job = self.worker.add(cpu, own.x, own.ids, own.weights, own.out, own.tokens)
        self._layers.append(_Layer(cpu, gpu, job))
        return len(self._layers) - 1

    def begin(self, plans: Sequence[LayerPlan]) -> None:
        """A chunk, one plan per layer: its first experts start to cross the bus. Before the chunk's first layer."""
        first = self._layers[0]
        part_experts = self.stream.part_bytes // sum(first.gpu.sizes)
        groups = []
        others = torch.full((len(plans), first.cpu.num_experts, 1), -1, dtype=torch.int64)
        for i, (plan, layer) in enumerate(zip(plans, self._layers, strict=True)):
            groups += make_groups(i, layer.cpu, plan.streamed, part_experts)
            others[i, [*plan.streamed, *layer.gpu.experts]] = 0
        self._others = others.to(self.stream.arena.device)
        self._plans = plans
        self.stream.start(groups, first.cpu.num_experts, first.gpu.sizes)
        self.worker.resume()

    def plan(self, layer: int) -> LayerPlan:
        return self._plans[layer]

    def not_on_cpu(self, layer: int) -> torch.Tensor:
        """int64 `[E, 1]`: 0 or more for experts that the GPU computes in this chunk."""
        return self._others[layer]

    def job(self, layer: int) -> int:
        return self._layers[layer].job


class StreamedPrefill:
    """The routed experts of one MoE layer in a chunk that `PrefillPass.begin` planned."""

    __slots__ = ("_cpu", "_gpu", "_layer", "_pass")

    is_capturable = False

    def __init__(self, cpu: ExpertLayer, gpu: GpuExperts, shared: PrefillPass) -> None:
        self._cpu = cpu
        self._gpu = gpu
        self._pass = shared
        self._layer = shared.add(cpu, gpu)

    @property
    def traffic(self) -> ExpertTraffic:
        return ExpertTraffic(self._cpu.bytes_read, self._cpu.seconds)

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        shared, layer = self._pass, self._layer
        if layer == 0 and shared.planner is not None:
            shared.begin(shared.planner(x.shape[0]))
        if shared.plan(layer).cpu:
            shared.exchange.give(x, topk, shared.not_on_cpu(layer))
            shared.worker.submit(stream_handle(x.device), shared.job(layer))
        self._gpu.forward(x, topk, ctx.out)
        for _ in range(shared.stream.groups_left(layer)):
            table = shared.stream.wait(layer)
            shared.compute(x, topk, shared.stream.arena, table, ctx.out, accumulate=True)
            shared.stream.release()

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:  # noqa: ARG002  # of the protocol
        if self._pass.plan(self._layer).cpu:
            self._pass.worker.wait(stream_handle(x.device), self._pass.job(self._layer))
            self._pass.exchange.take(ctx.out)
        if self._pass.planner is not None and x.device.type == "cuda":
            torch.cuda.current_stream(x.device).synchronize()
