"""`proa profile`: files of counts, a server that records, and what the table says."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from proa.cli.main import app
from proa.core.errors import ConfigError, ProaError
from proa.moe.stats import ExpertStats

runner = CliRunner()
# One layer whose first expert gets all, one that is even.
COUNTS = [[20.0] + [0.0] * 19, [1.0] * 20]


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": COUNTS}))
    return path


def run(*arguments):
    result = runner.invoke(app, ["profile", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_shares_of_the_most_used_experts(counts, tmp_path):
    report = json.loads(run(counts, "--json", "-o", tmp_path / "out.json").stdout)
    assert (report["layers"], report["experts"], report["tokens"]) == (2, 20, 40)
    assert report["by_layer"][0] == [1.0] * 4
    assert report["by_layer"][1] == pytest.approx([0.05, 0.1, 0.2, 0.5])
    assert report["all_layers"][0] == pytest.approx((20 + 1) / 40)
    assert ExpertStats.load(tmp_path / "out.json").counts.tolist() == COUNTS
    table = run(counts).stdout
    assert "100.0%" in table and "all" in table


def test_a_server_records_while_it_answers(fake_endpoint, tmp_path):
    """The routes are asked in order, the prompts of the file between start and stop."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('first\n\n{"prompt": "second"}\n{"messages": [{"role": "user", "content": "third"}]}\n')
    fake_endpoint.logical_count = COUNTS
    run(fake_endpoint.url, "--prompts", prompts, "--max-tokens", 7, "--concurrency", 1, "-o", tmp_path / "out.json")
    assert fake_endpoint.paths == [
        "/start_expert_distribution_record",
        "/v1/completions",
        "/v1/completions",
        "/v1/chat/completions",
        "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
    ]
    assert [r.get("prompt") for r in fake_endpoint.requests[1:4]] == ["first", "second", None]
    assert all(r["max_tokens"] == 7 and r["model"] == "fake-model" for r in fake_endpoint.requests[1:4])
    assert ExpertStats.load(tmp_path / "out.json").counts.tolist() == COUNTS


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "at least one prompt"), ('{"text": "x"}', "prompt or messages"), ('{"prompt": ', "line 1")],
)
def test_files_of_prompts_that_are_none(fake_endpoint, tmp_path, text, message):
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(fake_endpoint.url, "--prompts", path)
    assert not fake_endpoint.requests


def test_a_prompt_that_fails_ends_the_recording(fake_endpoint, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first")
    fake_endpoint.fail_with = (500, {"error": {"message": "broken"}})
    fake_endpoint.fails = "completions"
    with pytest.raises(ProaError, match="broken"):
        run(fake_endpoint.url, "--prompts", path)
    assert fake_endpoint.paths[-1] == "/stop_expert_distribution_record"


def test_faults_are_said(counts, tmp_path, fake_endpoint):
    with pytest.raises(ConfigError, match="a server to send them to"):
        run(counts, "--prompts", counts)
    with pytest.raises(ConfigError, match="--output"):
        run(counts, "-o", tmp_path / "no" / "out.json")
    with pytest.raises(ConfigError, match="--output"):  # before anything is recorded
        run(fake_endpoint.url, "-o", tmp_path / "no" / "out.json")
    assert not fake_endpoint.paths
    fake_endpoint.logical_count = [[0, 0]]
    with pytest.raises(ConfigError, match="tokens that were routed"):
        run(fake_endpoint.url)
    fake_endpoint.fail_with = (409, {"error": {"message": "not recording"}})
    with pytest.raises(ProaError, match="not recording"):
        run(fake_endpoint.url)
