"""What a pass over a prompt shows of the machine and the model, for the plans of the next ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from proa.moe.prefill_plan import LayerPlan
from proa.moe.prefill_planner import PrefillPlanner

__all__ = ["PassObserver"]


class PassObserver:
    """Times the layers of a pass on the GPU, without waiting for it, and counts its routing."""

    __slots__ = ("_ended", "_on_gpu", "_planner", "_plans", "_started", "_tokens")

    def __init__(self, planner: PrefillPlanner, device: torch.device) -> None:
        self._planner = planner
        self._on_gpu = device.type == "cuda"
        self._plans: Sequence[LayerPlan] = ()
        self._tokens = 0
        # Of the layers, as far as the pass has come.
        self._started: list[torch.cuda.Event] = []
        self._ended: list[torch.cuda.Event] = []

    def begin(self, tokens: int, plans: Sequence[LayerPlan]) -> None:
        """A pass begins."""
        self._tokens, self._plans = tokens, plans
        self._started, self._ended = [], []

    def submitted(self, layer: int, ids: torch.Tensor) -> None:
        """The layer's experts begin. ids: int32 `[T, k]`."""
        self._planner.count(layer, ids)
        self._record(self._started)

    def finished(self) -> None:
        """All of the layer's experts are queued."""
        self._record(self._ended)

    def learn(self) -> None:
        """Before the next pass: what the one before has shown, if it came through all layers.

        The last one may be missing: only tokens that are drawn from go through its experts, few in most passes.
        """
        if self._tokens == 0 or len(self._ended) < max(1, len(self._plans) - 1):
            return
        self._ended[-1].synchronize()
        taken = [_seconds(*pair) for pair in zip(self._started, self._ended, strict=True)]
        between = [_seconds(*pair) for pair in zip(self._ended, self._started[1:], strict=False)]
        # Decode steps and layers without experts lie between some of the layers.
        trunk = min(between, default=0.0)
        mixed = [(seconds, plan.seconds) for seconds, plan in zip(taken, self._plans, strict=False) if plan.cpu]
        self._planner.learn(
            self._tokens,
            trunk_s=trunk,
            experts_s=statistics.median(seconds for seconds, _ in mixed) if mixed else None,
            planned_s=statistics.median(planned for _, planned in mixed) if mixed else 0.0,
        )
        self._tokens = 0

    def _record(self, events: list[torch.cuda.Event]) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)


def _seconds(first: torch.cuda.Event, second: torch.cuda.Event) -> float:
    return float(1e-3 * first.elapsed_time(second))
