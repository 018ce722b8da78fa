"""Decode of a few tokens through the layers of a `HybridStack`: the step, its parts alone, and the hand-over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from proa.cli.bench_hybrid_setup import HybridStack
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext

__all__ = ["capture", "measure_decode"]

ROUTINGS = 16
ROUNDS = 4
WARM_UP = 3


class _Step:
    """The tensors of a step, at fixed places, and the routings that take turns."""

    def __init__(self, stack: HybridStack, tokens: int) -> None:
        dims, layers = stack.spec.experts.dims, stack.spec.layers
        rng = np.random.default_rng(0)
        shape = (ROUTINGS, layers, tokens, dims.top_k)
        chosen = np.argsort(rng.random((*shape[:3], dims.experts)), axis=-1)[..., : dims.top_k]
        self.routings = np.ascontiguousarray(chosen, np.int32)
        self.none = torch.full(shape[1:], -1, dtype=torch.int32, device=stack.device)
        self.bank = torch.from_numpy(self.routings).to(stack.device)
        self.ids = self.bank[0].clone()
        self.weights = torch.full((tokens, dims.top_k), 1.0 / dims.top_k, device=stack.device)
        self.x = torch.randn(tokens, dims.hidden, device=stack.device)
        self.out = torch.zeros(tokens, dims.hidden, device=stack.device)
        self.stack = stack

    def topk(self, layer: int) -> TopK:
        return TopK(self.ids[layer], self.weights)

    def all_layers(self) -> None:
        """A step."""
        for i, strategy in enumerate(self.stack.decode):
            ctx = LayerContext(i, self.out, defers=self.stack.spec.deferred > 0)
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


def capture(stack: HybridStack, step: Callable[[], None]) -> Callable[[], None]:
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


@dataclass(slots=True)
class _Samples:
    """Seconds of calls, and of the CPU's experts in them; the first of a round do not count."""

    wall: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(self.wall)


class _Side:
    """One thing that is timed: a step, or what a step is compared with."""

    def __init__(self, step: _Step, call: Callable[[int], None]) -> None:
        self._step = step
        self._call = call
        self.samples = _Samples()

    def round(self, seconds: float) -> None:
        stack, count = self._step.stack, 0
        end = time.perf_counter() + seconds
        while count < WARM_UP + 2 or time.perf_counter() < end:
            routing = count % ROUTINGS
            self._step.ids.copy_(self._step.bank[routing])
            stack.worker.resume()
            stack.synchronize()
            before = stack.cpu_seconds
            start = time.perf_counter()
            self._call(routing)
            stack.synchronize()
            wall = time.perf_counter() - start
            if count >= WARM_UP:
                self.samples.wall.append(wall)
                self.samples.inside.append(stack.cpu_seconds - before)
            count += 1


def _cpu_alone(step: _Step) -> Callable[[int], None]:
    """The CPU's experts of a step, one layer after the other without a break."""
    stack = step.stack
    x, weights, out = (tensor.cpu().numpy() for tensor in (step.x, step.weights, step.out))
    here = _on_cpu(step)

    def call(routing: int) -> None:
        for layer, ids in zip(stack.layers, here[routing], strict=True):
            layer.forward(x, ids, weights, out)

    return call


def _on_cpu(step: _Step) -> np.ndarray:
    """The routings, -1 for the GPU's experts."""
    stack = step.stack
    kept = np.ones((stack.spec.layers, stack.spec.experts.dims.experts), np.bool_)
    for i, gpu in enumerate(stack.gpus):
        kept[i, gpu.experts] = False
    return np.where(kept[np.arange(len(kept))[None, :, None, None], step.routings], step.routings, np.int32(-1))


def _experts_read(step: _Step) -> float:
    """Experts that the CPU reads in a step, each once a layer however many tokens chose it; the routings' mean."""
    rows = _on_cpu(step).reshape(ROUTINGS * step.stack.spec.layers, -1)
    return step.stack.spec.layers * statistics.fmean(len(set(row.tolist()) - {-1}) for row in rows)


def _replay(step: _Step, work: Callable[[], None]) -> _Side:
    run = capture(step.stack, work)
    return _Side(step, lambda _: run())


def _in_turn(sides: list[_Side], seconds: float) -> None:
    """Rounds of all sides, so that what else the machine does meets all alike."""
    for _ in range(ROUNDS):
        for side in sides:
            side.round(seconds / ROUNDS)


def measure_decode(stack: HybridStack, tokens: int, write: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds of a step of all layers in memory, of so many sequences; the hand-over in microseconds per layer."""
    write(f"decode of {tokens} tokens")
    step, seconds, layers = _Step(stack, tokens), stack.spec.experts.seconds, stack.spec.layers
    cpu, gpu, whole = _Side(step, _cpu_alone(step)), _replay(step, step.gpu_only), _replay(step, step.all_layers)
    _in_turn([cpu, whole, gpu], seconds)
    step.bank = step.none[None].expand(ROUTINGS, *step.none.shape)  # no experts: what is left is the hand-over
    exchange, empty = _replay(step, step.exchange_only), _replay(step, step.experts_only)
    _in_turn([exchange, empty], seconds / 2)
    cpu_alone, gpu_alone, step_s = cpu.samples.median(), gpu.samples.median(), whole.samples.median()
    inside = statistics.median(whole.samples.inside)
    empty_s = empty.samples.median() - statistics.median(empty.samples.inside)
    result = {
        "tokens": tokens,
        "step_ms": step_s * 1e3,
        "cpu_alone_ms": cpu_alone * 1e3,
        "gpu_alone_ms": gpu_alone * 1e3,
        "cpu_in_step_ms": inside * 1e3,
        "step_over_bound": step_s / max(cpu_alone, gpu_alone),
        "cpu_in_step_over_alone": inside / cpu_alone,
        "hand_over_us": (empty_s - exchange.samples.median()) / layers * 1e6,
        "exchange_us": exchange.samples.median() / layers * 1e6,
        "cpu_gb_per_s": _experts_read(step) * stack.spec.experts.bytes_per_expert / cpu_alone / 1e9,
        "faults": float(stack.worker.faults),
    }
    result["model_tokens_per_s"] = tokens * layers / (step_s * stack.spec.trunk.layers)
    for name, value in result.items():
        write(f"  {name} {value:.4g}")
    return result
