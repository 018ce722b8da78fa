"""What a pass over a prompt shows of the machine and the model, for the plans of the next ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proa.moe.prefill_plan import LayerPlan
from proa.moe.prefill_planner import PrefillPlanner

__all__ = ["PassObserver"]


class PassObserver:
    """Times the layers of a pass on the GPU, without waiting for it, and counts its routing."""

    __slots__ = ("_cpu_s", "_ended", "_on_gpu", "_planner", "_plans", "_started", "_tokens")

    def __init__(self, planner: PrefillPlanner, device: torch.device) -> None:
        self._planner = planner
        self._on_gpu = device.type == "cuda"
        self._plans: Sequence[LayerPlan] = ()
        self._tokens = 0
        self._cpu_s = 0.0
        # Of the layers, as far as the pass has come.
        self._started: list[torch.cuda.Event] = []
        self._ended: list[torch.cuda.Event] = []

    def begin(self, tokens: int, plans: Sequence[LayerPlan], cpu_s: float) -> None:
        """A pass begins; the CPU's experts have taken `cpu_s` so far. With no tokens nothing is learnt from it."""
        self._tokens, self._plans, self._cpu_s = tokens, plans, cpu_s
        self._started, self._ended = [], []

    def submitted(self, layer: int, ids: torch.Tensor) -> None:
        """The layer's experts begin. ids: int32 `[T, k]`."""
        self._planner.count(layer, ids)
        self._record(self._started)

    def finished(self) -> None:
        """All of the layer's experts are queued."""
        self._record(self._ended)

    def learn(self, cpu_s: float) -> None:
        """Before the next pass: what the one before has shown, if it came through all layers.

        The last one may be missing: only tokens that are drawn from go through its experts, few in most passes.
        """
        seen = self._plans[: len(self._ended)]
        if self._tokens == 0 or len(seen) < max(1, len(self._plans) - 1):
            return
        self._ended[-1].synchronize()
        # Decode steps and layers without experts lie between some of the layers.
        pairs = zip(self._ended, self._started[1:], strict=False)
        trunk = min((1e-3 * ended.elapsed_time(started) for ended, started in pairs), default=0.0)
        planned = sum(plan.cpu_seconds for plan in seen)
        self._planner.learn(self._tokens, trunk_s=trunk, cpu_s=cpu_s - self._cpu_s, planned_cpu_s=planned)
        self._tokens = 0

    def _record(self, events: list[torch.cuda.Event]) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)
