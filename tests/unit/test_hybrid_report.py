"""What an engine says of experts on both sides, and how often it asks for it."""

from __future__ import annotations

from proa.engine.hybrid_report import HybridReport
from proa.moe.traffic import HybridTraffic


def test_layers_are_asked_once_a_second_and_told_when_they_were():
    asked, now = [], 0.0

    def source():
        asked.append(now)
        return HybridTraffic(((10, 4), (10, 6)), 500, 0.25)

    report = HybridReport(source, lambda: now)
    streamed = {"streamed_bytes": 500, "streamed_ms": 250.0}
    assert report.fields() == {"expert_slots": ((10, 4), (10, 6)), **streamed}
    now = 0.9
    assert report.fields() == streamed
    now = 1.0
    assert "expert_slots" in report.fields()
    assert asked == [0.0, 1.0]


def test_a_model_on_one_side_says_nothing():
    assert HybridReport(lambda: None, lambda: 0.0).fields() == {}
