"""What a pass shows of the machine, on a clock of its own."""

from __future__ import annotations

import pytest
import torch

from proa.moe.pass_observer import PassObserver
from proa.moe.prefill_plan import LayerPlan

LAYERS, TRUNK_S, EXPERTS_S = 4, 0.002, 0.1


class Event:
    """Of a device whose time is `now`."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class Planner:
    def __init__(self) -> None:
        self.learned: list[dict[str, float]] = []

    def count(self, layer: int, ids: torch.Tensor) -> None:
        pass

    def learn(self, tokens: int, **shown: float) -> None:
        self.learned.append({"tokens": tokens, **shown})


@pytest.mark.parametrize(("seen", "learns"), [(LAYERS, True), (LAYERS - 1, True), (LAYERS - 2, False), (0, False)])
def test_a_pass_is_learnt_from_though_its_last_layer_has_few_tokens(monkeypatch, seen, learns):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    planner = Planner()
    observer = PassObserver(planner, torch.device("cuda"))
    observer.begin(512, [LayerPlan((0,), (1,), 0.08, 0.07)] * LAYERS, 5.0)
    for layer in range(seen):
        Event.now += TRUNK_S * (5 if layer == 1 else 1)  # a decode step, once
        observer.submitted(layer, torch.zeros(1, 1))
        Event.now += EXPERTS_S
        observer.finished()
    observer.learn(5.25)
    observer.learn(5.25)
    assert len(planner.learned) == learns, "once"
    if learns:
        (shown,) = planner.learned
        assert shown["tokens"] == 512
        assert shown["trunk_s"] == pytest.approx(TRUNK_S) and shown["cpu_s"] == pytest.approx(0.25)
        assert shown["planned_cpu_s"] == pytest.approx(0.07 * seen)
