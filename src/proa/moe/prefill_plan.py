"""Where each expert of a prompt's chunk runs, from measured rates: pure.

An expert that is not on the GPU either crosses the bus to it or runs on the CPU, and both go on at once. But the CPU
can begin a layer only when the trunk has come to it, and the trunk goes on only when the CPU is done, while copies run
ahead into the layers to come. So a layer takes the longest of

    copies, the hidden states that come back from the CPU among them;
    the trunk, then the experts on the GPU;
    the trunk, then hidden states to the CPU, its experts, and their results back.

The experts with the fewest tokens are the cheapest for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["ExpertSize", "LayerPlan", "PrefillRates", "plan_layer"]

# Both at once have to be expected to take this part of the better of the two alone, or that is chosen.
_WORTH = 0.97


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """Of one expert: `nbytes` as it is stored, and of its tokens: columns in and out, operations of a token."""

    hidden: int
    intermediate: int
    nbytes: int

    @property
    def flops(self) -> float:
        """Three products, a multiplication and an addition per weight."""
        return 6.0 * self.hidden * self.intermediate

    @property
    def row_bytes(self) -> float:
        """Of a hidden state, in float32."""
        return 4.0 * self.hidden


@dataclass(frozen=True, slots=True)
class PrefillRates:
    """Of this machine, measured at start.

    Copies and the CPU's experts slow each other down, as both read the same memory. `cpu_s`: seconds that the CPU takes
    for an expert with `cpu_tokens` (ascending) tokens while nothing is copied, `cpu_beside_s`: beside copies.
    """

    stream_bytes: float  # per second, of experts from pinned memory to the GPU
    stream_beside_bytes: float  # the same while the CPU computes experts
    row_bytes: float  # per second, of hidden states to the CPU, and of results from it
    gpu_flops: float  # per second, of the GPU's grouped products
    cpu_tokens: tuple[float, ...]
    cpu_s: tuple[float, ...]
    cpu_beside_s: tuple[float, ...]

    def cpu_seconds(self, tokens: np.ndarray, *, beside: bool) -> np.ndarray:
        """Of experts with so many tokens each; linear between and beyond what was measured, 0 for none."""
        at, times = np.array(self.cpu_tokens), np.array(self.cpu_beside_s if beside else self.cpu_s)
        times = np.maximum.accumulate(times)
        seconds = np.interp(tokens, at, times)
        if len(at) > 1:
            slope = max(0.0, (times[-1] - times[-2]) / (at[-1] - at[-2]))
            seconds = seconds + slope * np.maximum(tokens - at[-1], 0.0)
        else:
            seconds = seconds * np.maximum(tokens / at[-1], 1.0)
        return np.asarray(np.where(tokens > 0, seconds, 0.0))


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Experts of a layer that are not on the GPU, in ascending order: those that cross the bus, those on the CPU.

    `seconds`: what the layer is expected to take, `cpu_seconds`: what the CPU's experts are.
    """

    streamed: tuple[int, ...]
    cpu: tuple[int, ...]
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def plan_layer(
    load: np.ndarray,
    on_gpu: np.ndarray,
    *,
    tokens: int,
    size: ExpertSize,
    rates: PrefillRates,
    trunk_s: float = 0.0,
    cpu_scale: float = 1.0,
    stream_all: bool | None = None,
) -> LayerPlan:
    """The split with the least time.

    `load` float64 `[E]`: how many of the chunk's `tokens` are expected at each expert; `on_gpu` bool `[E]`.
    `trunk_s`: of the rest of a layer; `cpu_scale`: how much longer the CPU has been taking than `rates` say.
    `stream_all`: true, all that are not on the GPU cross the bus, false, none (`--kt-gpu-prefill-token-threshold`);
    None: what is fastest.
    """
    away = np.flatnonzero(~on_gpu)
    order = away[np.argsort(load[away], kind="stable")]
    seconds, cpu = _seconds(load, order, tokens, size, rates, trunk_s, cpu_scale)
    if stream_all is not None:
        count = 0 if stream_all else len(order)
    else:
        unused = int((load[order] == 0).sum())  # what nobody needs stays where it is
        alone = min((unused, len(order)), key=lambda count: float(seconds[count]))
        count = max(unused, int(np.argmin(seconds)))
        if seconds[count] > _WORTH * seconds[alone]:
            count = alone
    return LayerPlan(
        tuple(sorted(int(expert) for expert in order[count:])),
        tuple(sorted(int(expert) for expert in order[:count])),
        float(seconds[count]),
        float(cpu[count]),
    )


def _seconds(
    load: np.ndarray,
    order: np.ndarray,
    tokens: int,
    size: ExpertSize,
    rates: PrefillRates,
    trunk_s: float,
    cpu_scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the layer and of the CPU's experts; entry n: the first n experts of `order` are the CPU's."""
    loads = load[order]
    on_cpu = np.concatenate([[0.0], np.cumsum(loads)])
    # Tokens with at least one of these experts, if they choose independently.
    rows = tokens * -np.expm1(-on_cpu / tokens) * size.row_bytes
    # An expert of which few tokens are expected may get none.
    needed = -np.expm1(-loads)
    given = np.divide(loads, needed, out=np.zeros_like(loads), where=needed > 0)
    alone, beside = (
        cpu_scale * np.concatenate([[0.0], np.cumsum(needed * rates.cpu_seconds(given, beside=flag))])
        for flag in (False, True)
    )
    crossing = (len(order) - np.arange(len(order) + 1)) * size.nbytes + rows
    # Beside each other until one is done.
    together = np.minimum(beside, crossing / rates.stream_beside_bytes)
    stream = together + (crossing - together * rates.stream_beside_bytes) / rates.stream_bytes
    share = np.divide(together, beside, out=np.ones_like(beside), where=beside > 0)
    cpu = together + (1.0 - share) * alone
    gpu = trunk_s + (load.sum() - on_cpu) * size.flops / rates.gpu_flops
    return np.maximum(np.maximum(stream, gpu), trunk_s + 2 * rows / rates.row_bytes + cpu), cpu
