"""Where each expert of a prompt's chunk runs, from measured rates: pure.

An expert that is not on the GPU either crosses the bus to it or runs on the CPU. Both go on at once, so a layer takes
as long as the slower of the two, and the experts with the fewest tokens are the cheapest for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["LayerPlan", "PrefillRates", "plan_layer"]


@dataclass(frozen=True, slots=True)
class PrefillRates:
    """Of this machine, measured at start: bytes and floating-point operations per second."""

    stream_bytes: float  # of experts from pinned memory to the GPU
    token_bytes: float  # of hidden states to the CPU and of results from it
    cpu_bytes: float  # of weights the CPU reads with few tokens, beside the stream
    cpu_flops: float  # of the CPU's experts with many, beside the stream
    gpu_flops: float  # of the GPU's grouped products


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Experts of a layer that are not on the GPU, in ascending order: those that cross the bus, those on the CPU.

    `seconds`: what the layer's experts are expected to take.
    """

    streamed: tuple[int, ...]
    cpu: tuple[int, ...]
    seconds: float


def plan_layer(
    load: np.ndarray,
    on_gpu: np.ndarray,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    expert_bytes: int,
    rates: PrefillRates,
    stream_all: bool | None = None,
) -> LayerPlan:
    """The split with the least time.

    `load` float64 `[E]`: how many of the chunk's `tokens` are expected at each expert; `on_gpu` bool `[E]`.
    `stream_all`: true, all that are not on the GPU cross the bus, false, none (`--kt-gpu-prefill-token-threshold`);
    None: what is fastest.
    """
    flops = 6.0 * hidden * intermediate  # of a token: three products, a multiplication and an addition per weight
    away = np.flatnonzero(~on_gpu)
    order = away[np.argsort(load[away], kind="stable")]
    loads = load[order]
    costs = np.where(loads > 0, np.maximum(expert_bytes / rates.cpu_bytes, loads * flops / rates.cpu_flops), 0.0)
    # Entry n of what follows: the n experts with the fewest tokens are the CPU's.
    cpu = np.concatenate([[0.0], np.cumsum(costs)])
    rows = tokens * hidden * 4.0  # float32, there and back; the way back is that of the stream
    stream = (len(order) - np.arange(len(order) + 1)) * expert_bytes / rates.stream_bytes
    stream[cpu > 0] += rows / rates.stream_bytes
    # The CPU reads all rows and writes all results, whoever needs them.
    cpu[cpu > 0] += 2 * rows / rates.token_bytes + 2 * rows / rates.cpu_bytes
    on_cpu = np.concatenate([[0.0], np.cumsum(loads)])
    gpu = (load.sum() - on_cpu) * flops / rates.gpu_flops
    seconds = np.maximum(cpu, np.maximum(stream, gpu))
    if stream_all is None:
        count = max(int(np.argmin(seconds)), int((loads == 0).sum()))  # what nobody needs stays where it is
    else:
        count = 0 if stream_all else len(order)
    return LayerPlan(
        tuple(sorted(int(expert) for expert in order[count:])),
        tuple(sorted(int(expert) for expert in order[:count])),
        float(seconds[count]),
    )
