from __future__ import annotations

import logging

import pytest

from proa.cli import loading
from proa.cli.loading import ByteDisplay, EngineDisplay
from proa.server.engine_process import EngineState, EngineStatus


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="proa.cli")
    logging.getLogger("proa").propagate = True
    return caplog


def test_without_a_terminal_bytes_rate_and_time_left_are_logged(clock, log):
    display = EngineDisplay(ByteDisplay(terminal=False))
    for seconds, done in ((0, 0), (1, 10**9), (10, 20 * 10**9), (20, 40 * 10**9)):
        clock[0] = 100.0 + seconds
        display(EngineStatus(EngineState.LOADING, done, 40 * 10**9))
    display(EngineStatus(EngineState.READY))
    assert [record.getMessage() for record in log.records] == [
        "loading weights: 20.00 of 40.00 GB, 2.00 GB/s, 10 s left",
        "loading weights: 40.00 of 40.00 GB, 2.00 GB/s, 0 s left",
        "loaded 40.00 GB in 20.0 s (2.00 GB/s)",
    ]


def test_a_failed_load_claims_nothing(clock, log):
    display = EngineDisplay(ByteDisplay(terminal=False))
    display(EngineStatus(EngineState.LOADING, 1, 2))
    display(EngineStatus(EngineState.FAILED))
    assert not log.records


def test_on_a_terminal_a_bar_is_drawn_and_taken_away(monkeypatch, capsys):
    monkeypatch.setattr(
        loading.console, "err", loading.console.err.__class__(stderr=True, force_terminal=True, width=100)
    )
    display = ByteDisplay()
    display.update("loading weights", 10**9, 4 * 10**9)
    display.update("loading weights", 2 * 10**9, 4 * 10**9)
    display.close()
    shown = capsys.readouterr().err
    assert "loading weights" in shown
    assert "2.00 of 4.00 GB" in shown
