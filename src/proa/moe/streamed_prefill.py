"""Prefill of a long chunk: one pass of the experts over the GPU, the CPU working beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertCompute, GpuExperts, stream_handle
from proa.moe.pass_observer import PassObserver
from proa.moe.prefill_plan import LayerPlan
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext
from proa.moe.stream import SuspendedStream, WeightStream, make_groups
from proa.moe.traffic import ExpertTraffic
from proa.native._C import StreamWorker
from proa.native.ops import ExpertLayer

__all__ = ["PrefillPass", "StreamedPrefill", "SuspendedPass"]


@dataclass(frozen=True, slots=True)
class _Layer:
    cpu: ExpertLayer
    gpu: GpuExperts
    job: int


@dataclass(frozen=True, slots=True)
class SuspendedPass:
    """A chunk between two of its layers."""

    plans: Sequence[LayerPlan]
    others: torch.Tensor
    stream: SuspendedStream


class PrefillPass:
    """What the layers of a model share: the stream of experts, tokens for the CPU's, and the plan of a chunk.

    The experts of all layers that stream have one format and size. `planner`: plans a chunk of so many tokens when its
    first layer comes to it, for who does not call `begin`. `observer`: sees the layers of a chunk.
    """

    __slots__ = (
        "_gathered",
        "_layers",
        "_others",
        "_plans",
        "compute",
        "exchange",
        "observer",
        "planner",
        "stream",
        "worker",
    )

    def __init__(
        self,
        stream: WeightStream,
        worker: StreamWorker,
        exchange: ExpertExchange,
        compute: ExpertCompute,
        planner: Callable[[int], Sequence[LayerPlan]] | None = None,
        observer: PassObserver | None = None,
    ) -> None:
        self.stream = stream
        self.worker = worker
        self.exchange = exchange
        self.compute = compute
        self.planner = planner
        self.observer = observer
        self._layers: list[_Layer] = []
        self._plans: Sequence[LayerPlan] = ()
        self._others = torch.empty(0)
        self._gathered = torch.empty(exchange.max_tokens, exchange.x.shape[1], device=stream.arena.device)

    def add(self, cpu: ExpertLayer, gpu: GpuExperts) -> int:
        """The next MoE layer's number."""
        own = self.exchange
        job = self.worker.add(cpu, own.x, own.ids, own.weights, own.out, own.tokens)
        self._layers.append(_Layer(cpu, gpu, job))
        return len(self._layers) - 1

    def begin(self, plans: Sequence[LayerPlan]) -> None:
        """A chunk, one plan per layer: its first experts start to cross the bus. Before the chunk's first layer."""
        first = self._layers[0]
        groups = []
        others = torch.full((len(plans), first.cpu.num_experts, 1), -1, dtype=torch.int64)
        sizes = first.gpu.sizes
        for i, (plan, layer) in enumerate(zip(plans, self._layers, strict=True)):
            if plan.streamed:
                sizes = layer.gpu.sizes
                groups += make_groups(i, layer.cpu, plan.streamed, self.stream.part_bytes // sum(sizes))
            away = [expert for expert in range(layer.cpu.num_experts) if not layer.cpu.is_loaded(expert)]
            others[i, [*plan.streamed, *away]] = 0
        self._others = others.to(self.stream.arena.device)
        self._plans = plans
        self.stream.start(groups, first.cpu.num_experts, sizes)
        self.worker.resume()

    def plan_chunk(self, tokens: int) -> None:
        """Before the first layer of a chunk for which nobody calls `begin`."""
        if self.planner is None:
            return
        if self.observer is not None:
            self.observer.learn(self.cpu_seconds)
        plans = self.planner(tokens)
        if self.observer is not None:
            self.observer.begin(tokens, plans, self.cpu_seconds)
        self.begin(plans)

    def suspend(self) -> SuspendedPass:
        """The chunk that stands between two layers, so that another one may be computed whole."""
        return SuspendedPass(self._plans, self._others, self.stream.suspend())

    def resume(self, suspended: SuspendedPass) -> None:
        """Goes on with it, whatever became of the other one. It shows nothing of the machine any more."""
        if self.observer is not None:
            self.observer.learn(self.cpu_seconds)
            self.observer.begin(0, (), 0.0)
        self._plans, self._others = suspended.plans, suspended.others
        self.stream.resume(suspended.stream)

    @property
    def cpu_seconds(self) -> float:
        """That the CPU's experts of chunks have taken so far."""
        return sum(self.worker.seconds(layer.job) for layer in self._layers)

    def rows_for_cpu(self, layer: int, topk: TopK) -> list[torch.Tensor]:
        """Tokens with an expert on the CPU, int64, as many at a time as the exchange holds."""
        if not self._plans[layer].cpu:
            return []
        ids = topk.ids
        wants = (ids >= 0) & (self._others[layer, ids.clamp(min=0).long(), 0] < 0)
        rows = wants.any(dim=1).nonzero()[:, 0]
        return list(torch.split(rows, self.exchange.max_tokens)) if rows.numel() else []

    def give(self, layer: int, x: torch.Tensor, topk: TopK, rows: torch.Tensor) -> None:
        """Sends these tokens to the CPU, which begins."""
        self.worker.resume()  # it has slept since the layer before
        gathered = self._gathered[: rows.numel()]
        torch.index_select(x, 0, rows, out=gathered)
        self.exchange.give(gathered, TopK(topk.ids[rows], topk.weights[rows]), self._others[layer])
        self.worker.submit(stream_handle(x.device), self._layers[layer].job)

    def take(self, layer: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the CPU's result of these tokens to `out`, once it is there."""
        self.worker.wait(stream_handle(out.device), self._layers[layer].job)
        self.exchange.take_rows(rows, out)


class StreamedPrefill:
    """The routed experts of one MoE layer in a chunk that `PrefillPass.begin` planned."""

    __slots__ = ("_cpu", "_gpu", "_layer", "_pass", "_rows")

    is_capturable = False

    def __init__(self, cpu: ExpertLayer, gpu: GpuExperts, shared: PrefillPass) -> None:
        self._cpu = cpu
        self._gpu = gpu
        self._pass = shared
        self._layer = shared.add(cpu, gpu)
        self._rows: list[torch.Tensor] = []

    @property
    def traffic(self) -> ExpertTraffic:
        return ExpertTraffic(self._cpu.bytes_read, self._cpu.seconds)

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        shared, layer = self._pass, self._layer
        if layer == 0:
            shared.plan_chunk(x.shape[0])
        if shared.observer is not None:
            shared.observer.submitted(layer, topk.ids)
        self._rows = shared.rows_for_cpu(layer, topk)
        if self._rows:
            shared.give(layer, x, topk, self._rows[0])
        self._gpu.forward(x, topk, ctx.out)
        for _ in range(shared.stream.groups_left(layer)):
            table = shared.stream.wait(layer)
            shared.compute(x, topk, shared.stream.arena, table, ctx.out, accumulate=True)
            shared.stream.release()

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        shared, layer = self._pass, self._layer
        for index, rows in enumerate(self._rows):
            if index > 0:
                shared.give(layer, x, topk, rows)
            shared.take(layer, rows, ctx.out)
        self._rows = []
        if shared.observer is not None:
            shared.observer.finished()
