"""Decode of one token through the layers of a `HybridStack`: the step, its parts alone, and the hand-over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from proa.cli.bench_hybrid_setup import HybridStack
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext

__all__ = ["measure_decode"]

ROUTINGS = 16
WARM_UP = 3


class _Step:
    """The tensors of a step, at fixed places, and the routings that take turns."""

    def __init__(self, stack: HybridStack) -> None:
        dims, layers = stack.spec.experts.dims, stack.spec.layers
        rng = np.random.default_rng(0)
        shape = (ROUTINGS, layers, 1, dims.top_k)
        chosen = np.argsort(rng.random((ROUTINGS, layers, 1, dims.experts)), axis=-1)[..., : dims.top_k]
        self.routings = np.ascontiguousarray(chosen, np.int32)
        self.none = torch.full(shape[1:], -1, dtype=torch.int32, device=stack.device)
        self.bank = torch.from_numpy(self.routings).to(stack.device)
        self.ids = self.bank[0].clone()
        self.weights = torch.full((1, dims.top_k), 1.0 / dims.top_k, device=stack.device)
        self.x = torch.randn(1, dims.hidden, device=stack.device)
        self.out = torch.zeros(1, dims.hidden, device=stack.device)
        self.stack = stack

    def topk(self, layer: int) -> TopK:
        return TopK(self.ids[layer], self.weights)

    def all_layers(self) -> None:
        """A step."""
        for i, strategy in enumerate(self.stack.decode):
            ctx = LayerContext(i, self.out)
            self.stack.trunk[i].decode_attention(self.x)
            strategy.submit(self.x, self.topk(i), ctx)
            self.stack.trunk[i].shared_experts(self.x, self.out)
            strategy.finish(self.x, self.topk(i), ctx)

    def experts_only(self) -> None:
        for i, strategy in enumerate(self.stack.decode):
            ctx = LayerContext(i, self.out)
            strategy.submit(self.x, self.topk(i), ctx)
            strategy.finish(self.x, self.topk(i), ctx)

    def gpu_only(self) -> None:
        """The GPU's work of a step, the exchange with the CPU included, without waiting for it."""
        for i, gpu in enumerate(self.stack.gpus):
            self.stack.trunk[i].decode_attention(self.x)
            self.stack.exchange.give(self.x, self.topk(i), gpu.table)
            gpu.forward(self.x, self.topk(i), self.out)
            self.stack.trunk[i].shared_experts(self.x, self.out)
            self.stack.exchange.take(self.out)

    def exchange_only(self) -> None:
        for i, gpu in enumerate(self.stack.gpus):
            self.stack.exchange.give(self.x, self.topk(i), gpu.table)
            gpu.forward(self.x, self.topk(i), self.out)
            self.stack.exchange.take(self.out)


def _capture(stack: HybridStack, step: Callable[[], None]) -> Callable[[], None]:
    """`step` as a CUDA graph; as it is without a GPU."""
    if stack.device.type != "cuda":
        return step
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    stack.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _times(step: _Step, run: Callable[[], None], seconds: float) -> tuple[float, float]:
    """(median seconds of a step, mean seconds the CPU's experts took in it), routings taking turns."""
    stack, times = step.stack, []
    layers = stack.layers
    before, count, end = 0.0, 0, time.perf_counter() + seconds
    while count < WARM_UP + 2 or time.perf_counter() < end:
        step.ids.copy_(step.bank[count % ROUTINGS])
        stack.worker.resume()
        stack.synchronize()
        if count == WARM_UP:
            before = sum(layer.seconds for layer in layers)
        start = time.perf_counter()
        run()
        stack.synchronize()
        times.append(time.perf_counter() - start)
        count += 1
    inside = (sum(layer.seconds for layer in layers) - before) / (count - WARM_UP)
    return statistics.median(times[WARM_UP:]), inside


def _cpu_alone(step: _Step, seconds: float) -> float:
    """Median seconds of the CPU's experts of a step, one layer after the other without a break."""
    stack, times, count = step.stack, [], 0
    x, weights, out = (tensor.cpu().numpy() for tensor in (step.x, step.weights, step.out))
    kept = np.ones((stack.spec.layers, stack.spec.experts.dims.experts), np.bool_)
    for i, gpu in enumerate(stack.gpus):
        kept[i, gpu.experts] = False
    end = time.perf_counter() + seconds
    while count < WARM_UP + 2 or time.perf_counter() < end:
        ids = step.routings[count % ROUTINGS]
        here = [np.where(kept[i][ids[i]], ids[i], np.int32(-1)) for i in range(len(ids))]
        start = time.perf_counter()
        for layer, own in zip(stack.layers, here, strict=True):
            layer.forward(x, own, weights, out)
        times.append(time.perf_counter() - start)
        count += 1
    return statistics.median(times[WARM_UP:])


def measure_decode(stack: HybridStack, write: Callable[[str], None]) -> dict[str, float]:
    """Seconds as milliseconds of a step of all layers in memory; the hand-over in microseconds per layer."""
    write("decode")
    stack.move_to_gpu()
    step, seconds, layers = _Step(stack), stack.spec.experts.seconds, stack.spec.layers
    cpu_alone = _cpu_alone(step, seconds)
    gpu_alone, _ = _times(step, _capture(stack, step.gpu_only), seconds / 2)
    whole, inside = _times(step, _capture(stack, step.all_layers), seconds)
    cpu_again = _cpu_alone(step, seconds / 2)
    step.bank = step.none[None].expand(ROUTINGS, *step.none.shape)  # no experts: what is left is the hand-over
    exchange, _ = _times(step, _capture(stack, step.exchange_only), seconds / 2)
    empty, empty_inside = _times(step, _capture(stack, step.experts_only), seconds / 2)
    bound = max(min(cpu_alone, cpu_again), gpu_alone)
    dims = stack.spec.experts.dims
    read = dims.top_k * stack.spec.experts.bytes_per_expert * layers * (1 - stack.spec.gpu_experts / dims.experts)
    result = {
        "step_ms": whole * 1e3,
        "cpu_alone_ms": cpu_alone * 1e3,
        "cpu_alone_after_ms": cpu_again * 1e3,
        "gpu_alone_ms": gpu_alone * 1e3,
        "cpu_in_step_ms": inside * 1e3,
        "step_over_bound": whole / bound,
        "cpu_in_step_over_alone": inside / min(cpu_alone, cpu_again),
        "hand_over_us": (empty - empty_inside - exchange) / layers * 1e6,
        "exchange_us": exchange / layers * 1e6,
        "cpu_gb_per_s": read / cpu_alone / 1e9,
        "faults": float(stack.worker.faults),
    }
    result["model_tokens_per_s"] = layers / (whole * stack.spec.trunk.layers)
    for name, value in result.items():
        write(f"  {name} {value:.3f}")
    return result
