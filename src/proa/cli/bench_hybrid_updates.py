"""Decode while experts follow a skewed routing, beside the same layers with experts that stay where they are.

Each layer's router prefers its experts by p(rank) ~ rank**-skew, ranks in a random order, and chooses top-k by p and
Gumbel noise. A phase is one such order. Uniform placement is measured on phases of its own, before and after: to an
order nobody followed any placement is a random one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proa.cli.bench_hybrid_decode import capture
from proa.cli.bench_hybrid_setup import HybridStack
from proa.kernels import reference
from proa.moe.mover import ExpertPlaces
from proa.moe.placement import ExpertBudget, place
from proa.moe.rebalance import RebalanceSpec
from proa.moe.router import TopK
from proa.moe.stats import RoutingCounts
from proa.moe.strategy import LayerContext
from proa.moe.updates import ExpertUpdates, UpdateSpec
from proa.moe.usage import ExpertUsage

__all__ = ["measure_updates"]

SETTLED = 4  # the last quarter of a phase


@dataclass(slots=True)
class _Phase:
    """Milliseconds and the share of routed tokens that met the GPU, by step."""

    step_ms: list[float]
    hits: list[float]

    def settled(self) -> tuple[float, float]:
        last = max(1, len(self.step_ms) // SETTLED)
        return statistics.median(self.step_ms[-last:]), statistics.fmean(self.hits[-last:])


class _RoutedStep:
    """A step of all layers, routers included: these count."""

    def __init__(self, stack: HybridStack, skew: float) -> None:
        dims, layers = stack.spec.experts.dims, stack.spec.layers
        self.stack = stack
        self._popularity = np.arange(1, dims.experts + 1) ** -skew
        self.counts = RoutingCounts(layers, dims.experts, stack.device)
        self.logits = torch.zeros(layers, 1, dims.experts, device=stack.device)
        self.x = torch.randn(1, dims.hidden, device=stack.device)
        self.out = torch.zeros(1, dims.hidden, device=stack.device)
        self._topk = TopK(
            torch.zeros(1, dims.top_k, dtype=torch.int32, device=stack.device),
            torch.zeros(1, dims.top_k, device=stack.device),
        )
        self._route: Callable[..., None] = reference.route
        if stack.device.type == "cuda":
            from proa.kernels.route import route  # slow to import

            self._route = route

    def trace(self, seed: int, steps: int) -> torch.Tensor:
        """Logits float32 `[steps, layers, 1, E]` of a phase."""
        rng = np.random.default_rng(seed)
        layers, _, experts = self.logits.shape
        order = np.stack([rng.permutation(np.log(self._popularity)) for _ in range(layers)])
        noisy = (order[None] + rng.gumbel(size=(steps, layers, experts))).astype(np.float32)
        return torch.from_numpy(noisy)[:, :, None].to(self.stack.device)

    def __call__(self) -> None:
        for i, strategy in enumerate(self.stack.decode):
            ctx = LayerContext(i, self.out)
            self.stack.trunk[i].decode_attention(self.x)
            self._route(self.logits[i], self._topk.ids, self._topk.weights, counts=self.counts.of_layer(i))
            strategy.submit(self.x, self._topk, ctx)
            self.stack.trunk[i].shared_experts(self.x, self.out)
            strategy.finish(self.x, self._topk, ctx)


def _chosen(logits: torch.Tensor, top_k: int) -> np.ndarray:
    """Experts `[steps, layers, k]`."""
    return logits[:, :, 0].topk(top_k, dim=-1).indices.cpu().numpy()


def _run(step: _RoutedStep, replay: Callable[[], None], trace: torch.Tensor, updates: ExpertUpdates) -> _Phase:
    """`updates` that `usage` does not know stay as they are: then nothing moves."""
    stack, phase = step.stack, _Phase([], [])
    usage = ExpertUsage(step.counts, updates)
    usage.reset()
    chosen = _chosen(trace, stack.spec.experts.dims.top_k)
    layers = np.arange(stack.spec.layers)[:, None]
    stack.worker.resume()
    for logits, experts in zip(trace, chosen, strict=True):
        phase.hits.append(float(updates.placement.on_gpu[layers, experts].mean()))
        start = time.perf_counter()
        step.logits.copy_(logits)
        replay()
        stack.synchronize()
        usage.after_step(1)
        phase.step_ms.append((time.perf_counter() - start) * 1e3)
    return phase


def measure_updates(
    stack: HybridStack, write: Callable[[str], None], *, skew: float = 0.8, steps: int = 800
) -> dict[str, Any]:
    """Two phases of `steps` steps with updates, between two of half as many without. Experts have to be on the GPU."""
    write("updates")
    dims, spec = stack.spec.experts.dims, stack.spec
    budget = ExpertBudget.per_layer(spec.layers, dims.experts, spec.gpu_experts)
    rebalance = RebalanceSpec(max_swaps=stack.arena.num_free)
    updates, still = (
        ExpertUpdates(
            [ExpertPlaces(*pair) for pair in zip(stack.layers, stack.gpus, strict=True)],
            place("uniform", budget),
            dims.top_k,
            stack.device,
            UpdateSpec(interval=interval, rebalance=rebalance),
        )
        for interval in (16, 1 << 60)
    )
    step = _RoutedStep(stack, skew)
    replay = capture(stack, step)
    before = _run(step, replay, step.trace(0, steps // 2), still)
    followed = [_run(step, replay, step.trace(1 + i, steps), updates) for i in range(2)]
    still.placement = updates.placement
    after = _run(step, replay, step.trace(3, steps // 2), still)
    uniform = [phase.settled() for phase in (before, after)]
    settled = [phase.settled() for phase in followed]
    base = statistics.fmean(ms for ms, _ in uniform)
    result = {
        "skew": skew,
        "gpu_share": spec.gpu_experts / dims.experts,
        "uniform_ms": [ms for ms, _ in uniform],
        "uniform_hits": [hits for _, hits in uniform],
        "followed_ms": [ms for ms, _ in settled],
        "followed_hits": [hits for _, hits in settled],
        "whole_phase_ms": [statistics.fmean(phase.step_ms) for phase in followed],
        "slowest_step_ms": [max(phase.step_ms[16:]) for phase in followed],
        "moved": updates.num_moved,
        "gain_settled": base / statistics.fmean(ms for ms, _ in settled) - 1,
        "gain_learning_included": base / statistics.fmean(statistics.fmean(p.step_ms) for p in followed) - 1,
        "faults": stack.worker.faults,
    }
    for name, value in result.items():
        write(f"  {name} {value}")
    return result
