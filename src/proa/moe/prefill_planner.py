"""Plans of passes over prompts, from the rates of the machine and from what the passes before have shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from proa.moe.prefill_plan import ExpertSize, LayerPlan, PrefillRates, plan_layer

__all__ = ["PrefillPlanner"]

# How much a pass counts for the next one's expectations.
_NEW = 0.5
# By these factors the CPU may be faster and slower than was measured at start, when the machine had other work or none.
_SCALES = (0.25, 4.0)
_FORGOTTEN = 0.1


class PrefillPlanner:
    """What each expert gets of a chunk's tokens is expected to be as in the chunks before; evenly at first.

    `stream_all_from`: chunks of so many tokens and more stream all experts, shorter ones none; None: what is fastest.
    """

    __slots__ = ("_counts", "_cpu_scale", "_rates", "_size", "_stream_all_from", "_top_k", "_trunk_token_s")

    def __init__(
        self,
        rates: PrefillRates,
        size: ExpertSize,
        *,
        layers: int,
        experts: int,
        top_k: int,
        device: torch.device,
        stream_all_from: int | None = None,
    ) -> None:
        self._rates = rates
        self._size = size
        self._top_k = top_k
        self._stream_all_from = stream_all_from
        # Tokens at each expert in chunks so far, the older ones counting less.
        self._counts = torch.zeros(layers, experts, device=device)
        self._cpu_scale = 1.0
        self._trunk_token_s = 0.0

    def count(self, layer: int, ids: torch.Tensor) -> None:
        """A chunk's routing, int32 `[T, k]`, -1 for no expert. Queued on the device."""
        chosen = ids.flatten().long()
        self._counts[layer].index_add_(0, chosen.clamp(min=0), (chosen >= 0).float())

    def plans(self, tokens: int, on_gpu: Sequence[np.ndarray], streams: Sequence[bool]) -> list[LayerPlan]:
        """Of the layers, each with `on_gpu` bool `[E]`; the experts of one that `streams` not cannot cross the bus."""
        counts = self._counts.double().cpu().numpy()
        self._counts *= 1.0 - _NEW
        forced = None if self._stream_all_from is None else tokens >= self._stream_all_from
        plans = []
        for layer, here in enumerate(on_gpu):
            evenly = np.full(here.shape, 1.0 / len(here))
            # As many tokens as there are experts make the even guess forgotten.
            seen = counts[layer] + evenly * self._top_k
            plans.append(
                plan_layer(
                    tokens * self._top_k * seen / seen.sum(),
                    here,
                    tokens=tokens,
                    size=self._size,
                    rates=self._rates,
                    trunk_s=tokens * self._trunk_token_s,
                    cpu_scale=self._cpu_scale,
                    stream_all=forced if streams[layer] else False,
                )
            )
        return plans

    def learn(self, tokens: int, *, trunk_s: float, cpu_s: float, planned_cpu_s: float) -> None:
        """Of a pass: the time of a layer outside its experts, and what its experts on the CPU took in all layers."""
        if planned_cpu_s == 0:  # a CPU that was too slow to be used is tried again some passes later
            self._cpu_scale += _FORGOTTEN * (1.0 - self._cpu_scale)
        else:
            low, high = _SCALES
            scale = min(high, max(low, self._cpu_scale * cpu_s / planned_cpu_s))
            self._cpu_scale += _NEW * (scale - self._cpu_scale)
        first = self._trunk_token_s == 0.0
        self._trunk_token_s += (1.0 if first else _NEW) * (trunk_s / tokens - self._trunk_token_s)
