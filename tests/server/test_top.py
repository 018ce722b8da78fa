"""`proa top` beside a server, and the rates that it shows."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest
from rich.console import Console
from server_process import KEY, ServerProcess
from typer.testing import CliRunner

from proa.cli.client import Endpoint
from proa.cli.main import app
from proa.cli.server_metrics import ServerMetrics, fetch_metrics, parse_metrics
from proa.cli.top import render
from proa.core.errors import ProaError, UnavailableError
from proa.server.rates import Rate

runner = CliRunner()


def top(server: ServerProcess, *arguments: str):
    return runner.invoke(app, ["top", server.url, "--once", *arguments], env={"COLUMNS": "160", "PROA_API_KEY": ""})


@pytest.fixture
def busy(server: ServerProcess):
    """A server that has generated for some seconds."""
    with server.client() as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 400}).status_code == 200
        fetched = lambda: fetch_metrics(client, Endpoint(server.url, KEY))  # noqa: E731
        server.wait(lambda: fetched().running == 0 and fetched().stream_gb_s > 0)
    return server


def test_json(busy: ServerProcess):
    result = top(busy, "--json", "--api-key", KEY)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["model"] == "tiny" and found["is_ready"] and found["running"] == found["waiting"] == 0
    assert found["kv_capacity"] == 65536 and found["moved_experts"] == 3
    # 1000 bytes in 0.1 ms a token; 50 MB in 1 ms.
    assert found["expert_gb_s"] == pytest.approx(0.01) and found["stream_gb_s"] == pytest.approx(50.0)
    assert found["ram_gb_s"] == 100.0 and found["bandwidth_share"] == pytest.approx(1e-4)
    assert found["gpu_hits"] == [pytest.approx(0.25), pytest.approx(0.75)]


def test_table(busy: ServerProcess):
    result = top(busy, "--api-key", KEY)
    assert result.exit_code == 0, result.output
    for text in (
        "tiny  ready", "0 running, 0 waiting", "tokens/s", "of 65536 tokens", "0.0 GB/s, 0% of the RAM's 100",
        "▃▇  50% of slots, 25% to 75% by layer", "50.0 GB/s", "3 experts moved",
    ):  # fmt: skip
        assert text in result.stdout, result.stdout


def test_without_the_key(server: ServerProcess):
    result = top(server, "--json")
    assert result.exit_code != 0 and "status 401" in str(result.exception)


def test_no_server():
    result = runner.invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert "expected a server, got ConnectError" in str(result.exception)


def test_metrics_of_another_program():
    for text in ("", "up 1\n", "not metrics at all {"):
        with pytest.raises(ProaError, match="expected the metrics of a proa server"):
            parse_metrics(text, "http://x")


def test_a_prompt_on_its_way(server: ServerProcess):
    text = httpx.get(f"{server.url}/metrics", headers=server.headers).text
    text = text.replace('proa:prefill_tokens{model_name="tiny"} 0.0', 'proa:prefill_tokens{model_name="tiny"} 32768.0')
    text = text.replace('proa:prefill_share{model_name="tiny"} 0.0', 'proa:prefill_share{model_name="tiny"} 0.5')
    assert "50% of the layers, 32768 tokens" in printed(parse_metrics(text, ""), width=120)


def printed(metrics: ServerMetrics, note: str = "", *, width: int) -> str:
    console = Console(width=width, legacy_windows=False)
    with console.capture() as captured:
        console.print(render(metrics, note))
    return captured.get()


def test_a_narrow_terminal_shows_every_layer_and_why_it_is_not_new(busy: ServerProcess):
    text = httpx.get(f"{busy.url}/metrics", headers=busy.headers).text
    found = replace(parse_metrics(text, ""), gpu_hits=(0.5,) * 60, prefill_tokens=100, prefill_share=0.25)
    shown = printed(found, "the server does not answer", width=40)
    assert shown.count("▅") == 60 and "…" not in shown
    assert all(len(line) <= 40 for line in shown.splitlines())
    assert shown.index("does not answer") < shown.index("requests") and "ready" not in shown


def test_what_goes_away_is_waited_for(monkeypatch, busy: ServerProcess):
    """A restart behind a proxy: no connection, an error page, then the server again."""
    with busy.client() as client:
        found = fetch_metrics(client, Endpoint(busy.url, KEY))
    faults = [UnavailableError("x", "a server", "none"), ProaError("x", "an answer", "status 502: bad gateway")]

    def fetch(*_):
        if not faults:
            raise KeyboardInterrupt
        raise faults.pop(0)

    looks = []
    monkeypatch.setattr("proa.cli.top.fetch_metrics", lambda *a: found if not looks else fetch(*a))
    monkeypatch.setattr("proa.cli.top.render", lambda _, note="": looks.append(note) or note)
    result = runner.invoke(app, ["top", busy.url, "--interval", "0.1"])
    assert result.exit_code == 0, result.exception
    assert [note[4:20] for note in looks] == ["", "expected a serve", "expected an answ"]


def test_rates_are_of_the_last_window_with_growth():
    now = 0.0
    rate = Rate(lambda: now)
    for now, amount, per in ((0.4, 5.0, 1.0), (1.5, 30.0, 10.0), (2.0, 31.0, 11.0)):  # noqa: B007
        rate.update(amount, per)
    assert rate.value == 3.0  # the third is within the second window
    now = 3.0
    rate.update(31.0, 11.0)
    assert rate.value == pytest.approx(1.0)
    now = 9.0
    rate.update(31.0, 11.0)  # nothing happened: what was known stays
    assert rate.value == pytest.approx(1.0)
    now = 20.0
    rate.update(2.0, 1.0)  # another engine: totals begin anew
    now = 30.0
    rate.update(12.0, 2.0)
    assert rate.value == pytest.approx(10.0)


def test_a_rate_per_second():
    now = 10.0
    rate = Rate(lambda: now)
    now = 12.0
    rate.update(8.0)
    assert rate.value == pytest.approx(4.0)
    now = 14.0
    rate.update(8.0)
    assert rate.value == 0.0
