"""A prompt through the layers of a `HybridStack` in one pass of the experts over the bus, and its parts alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proa.cli.bench_hybrid_setup import HybridStack
from proa.moe.gpu_experts import stream_handle
from proa.moe.prefill_plan import ExpertSize, LayerPlan, PrefillRates
from proa.moe.prefill_planner import PrefillPlanner
from proa.moe.prefill_rates import measure_rates
from proa.moe.router import TopK
from proa.moe.strategy import LayerContext

__all__ = ["measure_prefill"]

PASSES = 2
LEARNED = 4  # passes that an engine would have planned by before
COPY_PIECE = 1 << 30
# Longer prompts take the CPU alone seconds a layer.
MAX_CPU_ONLY = 2048


class _Chunk:
    def __init__(self, stack: HybridStack, tokens: int) -> None:
        dims, device = stack.spec.experts.dims, stack.device
        self.stack, self.tokens = stack, tokens
        self.x = torch.randn(tokens, dims.hidden, device=device)
        self.out = torch.zeros(tokens, dims.hidden, device=device)
        scores = torch.rand(tokens, dims.experts, device=device)
        ids = scores.topk(dims.top_k, dim=1).indices.to(torch.int32)
        self.topk = TopK(ids, torch.full((tokens, dims.top_k), 1.0 / dims.top_k, device=device))

    def compute(self, *, trunk: bool = True) -> None:
        """All layers as the pass has them."""
        for i, strategy in enumerate(self.stack.prefill):
            ctx = LayerContext(i, self.out)
            if trunk:
                self.stack.trunk[i].prefill_attention(self.x)
            strategy.submit(self.x, self.topk, ctx)
            if trunk:
                self.stack.trunk[i].shared_experts(self.x, self.out)
            strategy.finish(self.x, self.topk, ctx)

    def stream_only(self) -> None:
        """The copies of the pass, and nothing computed."""
        stream = self.stack.stream
        for i in range(len(self.stack.prefill)):
            for _ in range(stream.groups_left(i)):
                stream.wait(i)
                stream.release()


def _copy_rate(stack: HybridStack) -> float:
    """Bytes per second of plain copies from the pinned experts to the GPU, in pieces of 1 GiB."""
    rates = []
    for _ in range(PASSES):
        stack.synchronize()
        start_time = time.perf_counter()
        nbytes = _copy_all(stack)
        stack.synchronize()
        rates.append(nbytes / (time.perf_counter() - start_time))
    return max(rates)


def _copy_all(stack: HybridStack) -> int:
    """Enqueues copies of all pinned experts into the ring; their bytes."""
    handle, total = stream_handle(stack.device), 0
    for layer in stack.layers:
        for start, nbytes in layer.used_memory:
            piece = min(COPY_PIECE, nbytes, stack.stream.part_bytes)
            for at in range(0, nbytes - piece + 1, piece):
                stack.driver.copy_to_device(handle, stack.stream.arena.data_ptr(), start + at, piece)
                total += piece
    return total


def _seconds(stack: HybridStack, plans: list[LayerPlan], work: Callable[[], None]) -> float:
    return statistics.median([_pass_seconds(stack, plans, work) for _ in range(PASSES + 1)][1:])


def _pass_seconds(stack: HybridStack, plans: list[LayerPlan], work: Callable[[], None]) -> float:
    stack.synchronize()
    start = time.perf_counter()
    stack.shared_pass.begin(plans)
    work()
    stack.synchronize()
    return time.perf_counter() - start


def _rates(stack: HybridStack, size: ExpertSize) -> PrefillRates:
    """Measured once."""
    if stack.rates is None:
        stack.rates = measure_rates(
            stack.layers[0],
            size,
            stack.stream,
            stack.driver,
            stack.compute,
            stack.shared_pass.exchange,
            top_k=stack.spec.experts.dims.top_k,
            max_tokens=stack.shared_pass.exchange.max_tokens,
        )
    return stack.rates


def _cpu_only(stack: HybridStack, chunk: _Chunk, streamed: list[LayerPlan]) -> float | None:
    """Seconds of a pass for which nothing crosses the bus."""
    if chunk.tokens > MAX_CPU_ONLY:
        return None
    return _seconds(stack, [LayerPlan((), plan.streamed) for plan in streamed], chunk.compute)


def _floor(
    rates: PrefillRates, size: ExpertSize, load: np.ndarray, streamed: list[LayerPlan], copy_rate: float
) -> float:
    """Seconds in which no split of the experts that cross or stay can be done: each side at its best rate all the time.

    That of the copies, and of the CPU those of one token (its reads) and of many (its products), neither slowed down by
    the other, no row sent, no trunk waited for. `load`: tokens expected at each expert.
    """
    read = size.nbytes / rates.cpu_s[0]
    peak = max(tokens * size.flops / seconds for tokens, seconds in zip(rates.cpu_tokens, rates.cpu_s, strict=True))
    total = 0.0
    for plan in streamed:
        here = load[list(plan.streamed)]
        touched = float(-np.expm1(-here).sum()) * size.nbytes
        cpu = max(touched / read, float(here.sum()) * size.flops / peak)
        bus = touched / copy_rate
        total += cpu * bus / (cpu + bus) if cpu and bus else 0.0
    return total


@dataclass(frozen=True, slots=True)
class _Planned:
    """A pass: its plans, seconds, and those of the CPU's experts."""

    plans: list[LayerPlan]
    seconds: float
    cpu_seconds: float


def _planned(stack: HybridStack, chunk: _Chunk, resident: np.ndarray, *, trunk_s: float) -> list[_Planned]:
    """Passes as an engine plans them, each from what those before have shown."""
    spec, dims = stack.spec, stack.spec.experts.dims
    size = ExpertSize(dims.hidden, dims.intermediate, sum(stack.sizes))
    planner = PrefillPlanner(
        _rates(stack, size),
        size,
        layers=spec.layers,
        experts=dims.experts,
        top_k=dims.top_k,
        device=stack.device,
    )
    planner.learn(chunk.tokens, trunk_s=trunk_s, cpu_s=0.0, planned_cpu_s=0.0)
    passes = []
    for _ in range(LEARNED + PASSES):
        plans, before = planner.plans(chunk.tokens, list(resident), [True] * spec.layers), stack.cpu_seconds
        seconds = _pass_seconds(stack, plans, chunk.compute)
        cpu = stack.cpu_seconds - before
        planned = sum(plan.cpu_seconds for plan in plans)
        planner.learn(chunk.tokens, trunk_s=trunk_s, cpu_s=cpu, planned_cpu_s=planned)
        passes.append(_Planned(plans, seconds, cpu))
    return passes


def measure_prefill(stack: HybridStack, tokens: int, write: Callable[[str], None]) -> dict[str, Any]:
    """Of a prompt of `tokens`; `*_s` are seconds of all layers in memory, `model_*` of the whole model's."""
    write(f"prompt of {tokens} tokens")
    spec, dims = stack.spec, stack.spec.experts.dims
    chunk = _Chunk(stack, tokens)
    resident = np.zeros((spec.layers, dims.experts), np.bool_)
    for i, gpu in enumerate(stack.gpus):
        resident[i, gpu.experts] = True
    everything = [LayerPlan(tuple(np.flatnonzero(~on_gpu).tolist()), (), 0.0) for on_gpu in resident]
    expert_bytes = sum(stack.sizes)
    streamed = sum(len(plan.streamed) for plan in everything) * expert_bytes
    size = ExpertSize(dims.hidden, dims.intermediate, expert_bytes)
    rates = _rates(stack, size)
    copy_rate = _copy_rate(stack)
    stream_s = _seconds(stack, everything, chunk.stream_only)
    experts_s = _without_copies(stack, chunk, everything, trunk=False)
    compute_s = _without_copies(stack, chunk, everything, trunk=True)
    chunk_s = _seconds(stack, everything, chunk.compute)
    cpu_only_s = _cpu_only(stack, chunk, everything)
    planned = _planned(stack, chunk, resident, trunk_s=(compute_s - experts_s) / spec.layers)
    mixed, mixed_s = planned[-1].plans, statistics.median(one.seconds for one in planned[-PASSES:])
    load = np.full(dims.experts, tokens * dims.top_k / dims.experts)
    floor_s = max(compute_s, _floor(rates, size, load, everything, copy_rate))
    result = {
        "tokens": tokens,
        "pinned_copy_gib_per_s": copy_rate / 2**30,
        "stream_gib_per_s": streamed / stream_s / 2**30,
        "stream_over_copy": streamed / stream_s / copy_rate,
        "bytes_over_bus_over_copy": streamed / chunk_s / copy_rate,
        "stream_s": stream_s,
        "compute_s": compute_s,
        "experts_s": experts_s,
        "chunk_s": chunk_s,
        "chunk_over_bound": chunk_s / max(stream_s, compute_s),
        "gpu_expert_tflops": spec.layers * tokens * dims.top_k * size.flops / experts_s / 1e12,
        "cpu_only_s": cpu_only_s,
        "cpu_experts_per_layer": len(mixed[0].cpu),
        "mixed_s": mixed_s,
        "mixed_first_s": planned[0].seconds,
        "mixed_planned_s": sum(plan.seconds for plan in mixed),
        "mixed_cpu_s": planned[-1].cpu_seconds,
        "mixed_cpu_planned_s": sum(plan.cpu_seconds for plan in mixed),
        "floor_s": floor_s,
        "floor_over_mixed": floor_s / mixed_s,
        "model_tokens_per_s": tokens / (mixed_s * spec.trunk.layers / spec.layers),
        "model_tokens_per_s_stream_only": tokens / (chunk_s * spec.trunk.layers / spec.layers),
    }
    for name, value in result.items():
        write(f"  {name} {value:.4g}" if value is not None else f"  {name} not measured")
    return result


def _without_copies(stack: HybridStack, chunk: _Chunk, plans: list[LayerPlan], *, trunk: bool) -> float:
    """Seconds of the GPU's work alone, on what the last pass left in the ring."""
    stack.stream.copies_enabled = False
    try:
        return _seconds(stack, plans, lambda: chunk.compute(trunk=trunk))
    finally:
        stack.stream.copies_enabled = True
