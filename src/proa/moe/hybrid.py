"""Decode on both: the GPU's experts beside the CPU's, handed over from inside a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.moe.deferral import DeferralPlan
from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import GpuExperts, stream_handle
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext
from proa.moe.traffic import ExpertTraffic
from proa.native._C import StreamWorker
from proa.native.ops import ExpertLayer

__all__ = ["HybridDecode", "HybridShared"]


@dataclass(frozen=True, slots=True)
class HybridShared:
    """What the layers of a model use one after another.

    With deferral the CPU still reads a layer's tokens while the next layer hands over its own: two exchanges in turn.
    """

    worker: StreamWorker
    exchanges: tuple[ExpertExchange, ExpertExchange]
    plan: DeferralPlan
    top_k: int

    @classmethod
    def create(
        cls, worker: StreamWorker, plan: DeferralPlan, device: torch.device, max_tokens: int, hidden: int, top_k: int
    ) -> HybridShared:
        """For batches of up to `max_tokens`."""
        late = any(plan.deferred)
        first = ExpertExchange(device, max_tokens, hidden, top_k, late=late)
        second = ExpertExchange(device, max_tokens, hidden, top_k, late=late) if late else first
        return cls(worker, (first, second), plan, top_k)

    def exchange(self, layer: int) -> ExpertExchange:
        return self.exchanges[layer % 2]


class HybridDecode:
    """The routed experts of MoE layer `layer`, counted from 0, for batches of up to `max_tokens` of the exchanges.

    `previous`: of the MoE layer before, whose late experts this one waits for. `waits_above`: with more tokens than
    this Python waits for the layer, so that a long forward may be given up between layers. Layers run in order, each
    forward through all of them; what one that raises between two layers leaves behind is ended by `Hybrid.settle`.
    Slots come late in forwards that say so (`LayerContext.defers`), in all layers alike.
    """

    __slots__ = ("_cpu", "_gpu", "_job", "_late_job", "_layer", "_previous_late_job", "_shared", "_waits_above")

    is_capturable = True

    def __init__(
        self,
        layer: int,
        cpu: ExpertLayer,
        gpu: GpuExperts,
        shared: HybridShared,
        previous: HybridDecode | None = None,
        *,
        waits_above: int = 1 << 30,
    ) -> None:
        assert (previous is not None) == (layer > 0), "layers are made in order"
        self._layer = layer
        self._waits_above = waits_above
        self._cpu = cpu
        self._gpu = gpu
        self._shared = shared
        own = shared.exchange(layer)
        self._job = shared.worker.add(cpu, own.x, own.ids, own.weights, own.out, own.tokens)
        self._late_job = -1
        if shared.plan.deferred[layer]:
            self._late_job = shared.worker.add(cpu, own.x, own.late_ids, own.weights, own.late_out, own.tokens)
        self._previous_late_job = previous.late_job if previous is not None else -1

    @property
    def traffic(self) -> ExpertTraffic:
        return ExpertTraffic(self._cpu.bytes_read, self._cpu.seconds)

    @property
    def slots(self) -> tuple[int, int]:
        """Totals: slots of tokens handed over, and those whose expert was on the GPU."""
        worker = self._shared.worker
        slots, on_cpu = worker.slots(self._job)
        if self._late_job >= 0:
            on_cpu += worker.slots(self._late_job)[1]
        return slots, slots - on_cpu

    @property
    def num_late(self) -> int:
        """Slots of tokens whose experts came one layer late so far."""
        return self._shared.worker.slots(self._late_job)[1] if self._late_job >= 0 else 0

    @property
    def late_job(self) -> int:
        """The job that the next layer waits for; -1: none."""
        return self._late_job

    def submit(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:
        shared, own = self._shared, self._shared.exchange(self._layer)
        stream = stream_handle(x.device)
        defers = ctx.defers and self._late_job >= 0
        own.give(x, topk, self._gpu.table, shared.plan.deferred[self._layer] if defers else 0)
        shared.worker.submit(stream, self._job)
        if defers:
            shared.worker.submit(stream, self._late_job)
        self._gpu.forward(x, topk, ctx.out)

    def finish(self, x: torch.Tensor, topk: TopK, ctx: LayerContext) -> None:  # noqa: ARG002  # of the protocol
        shared, stream = self._shared, stream_handle(x.device)
        shared.worker.wait(stream, self._job)
        shared.exchange(self._layer).take(ctx.out)
        if ctx.defers and self._previous_late_job >= 0:
            shared.worker.wait(stream, self._previous_late_job)
            shared.exchange(self._layer - 1).take_late(ctx.out)
        if x.shape[0] > self._waits_above and x.device.type == "cuda":
            torch.cuda.current_stream(x.device).synchronize()
