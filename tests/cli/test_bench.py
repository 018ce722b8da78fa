from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from proa.cli.bench_client import Load, Result, make_requests
from proa.cli.bench_report import Distribution, Report, percentile
from proa.cli.main import app
from proa.core.errors import ConfigError

runner = CliRunner()
LENGTHS = ["--random-input-len", "20", "--random-output-len", "5"]


def bench(fake_endpoint, *arguments):
    return runner.invoke(app, ["bench", "serve", "--url", fake_endpoint.url, *LENGTHS, *arguments])


def test_json_counts_what_was_sent_and_received(fake_endpoint, tmp_path):
    fake_endpoint.vocab_size = 50
    file = tmp_path / "runs.jsonl"
    result = bench(fake_endpoint, "--num-prompts", "6", "--max-concurrency", "2", "--json", "--output-file", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads(file.read_text()) == report
    assert (report["completed"], report["failed"]) == (6, 0)
    assert (report["input_tokens"], report["output_tokens"], report["cached_tokens"]) == (120, 30, 18)
    assert report["total_throughput"] == pytest.approx(150 / report["duration_s"])
    assert 0 < report["concurrency"] <= 2.001
    assert report["load"]["request_rate"] is None
    assert len(fake_endpoint.requests) == 7, "one warm-up request"
    for request in fake_endpoint.requests:
        assert len(request["prompt"]) == 20
        assert max(request["prompt"]) < 50
        assert request["ignore_eos"] is True
    assert len({tuple(r["prompt"]) for r in fake_endpoint.requests}) == 7


def test_table_has_the_rows_people_know(fake_endpoint):
    result = bench(fake_endpoint, "--num-prompts", "2")
    assert result.exit_code == 0, result.output
    for row in ("Successful requests", "Benchmark duration (s)", "Total input tokens", "Total generated tokens",
                "Input token throughput (tok/s)", "Output token throughput (tok/s)", "Total token throughput (tok/s)",
                "Concurrency", "Mean E2E (ms)", "Median TTFT (ms)", "P99 TPOT (ms)", "Max ITL (ms)"):  # fmt: skip
        assert row in result.stdout


def test_a_file_that_cannot_be_written_is_said_before_the_run(fake_endpoint, tmp_path):
    result = bench(fake_endpoint, "--num-prompts", "2", "--output-file", str(tmp_path / "no" / "runs.jsonl"))
    assert isinstance(result.exception, ConfigError) and "--output-file" in str(result.exception)
    assert not fake_endpoint.requests


def test_short_answers_count_as_failures(fake_endpoint):
    fake_endpoint.drop_tokens = 2
    result = bench(fake_endpoint, "--num-prompts", "2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failed"] == 2
    assert "expected 5 tokens, got 3" in result.stderr


def test_refusals_count_as_failures(fake_endpoint):
    fake_endpoint.fail_with = (400, {"error": {"message": "too long"}})
    result = bench(fake_endpoint, "--num-prompts", "2")
    assert result.exit_code == 1
    assert "too long" in result.stderr


@pytest.mark.parametrize("rate", ["0", "-1", "nan"])
def test_request_rate_must_be_positive(fake_endpoint, rate):
    assert "--request-rate" in str(bench(fake_endpoint, "--request-rate", rate).exception)


def test_the_same_seed_makes_the_same_requests():
    load = Load(num_prompts=5, input_len=100, output_len=40, range_ratio=0.25, vocab_size=9)
    first, again, other = make_requests(load, 3, 5), make_requests(load, 3, 5), make_requests(load, 4, 5)
    assert first == again != other
    assert all(25 <= len(r.token_ids) <= 100 and 10 <= r.output_len <= 40 for r in first)


def test_report_of_known_times():
    results = [
        Result(input_tokens=10, output_tokens=3, ttft_s=1.0, latency_s=2.0, gaps_s=[0.25, 0.75]),
        Result(input_tokens=20, output_tokens=1, ttft_s=3.0, latency_s=3.0),
        Result(input_tokens=99, output_tokens=99, error="failed"),
    ]
    report = Report.of(results, 4.0, Load(num_prompts=3, input_len=1, output_len=1), model="m", url="u")
    assert (report.completed, report.failed, report.input_tokens, report.output_tokens) == (2, 1, 30, 4)
    assert (report.input_throughput, report.output_throughput, report.total_throughput) == (7.5, 1.0, 8.5)
    assert report.concurrency == 1.25
    assert (report.e2e_ms.mean, report.e2e_ms.median) == (2500.0, 2500.0)
    assert report.ttft_ms.max == 3000.0
    assert report.tpot_ms.mean == 500.0, "a one-token answer has no time per further token"
    assert report.itl_ms == Distribution.of([0.25, 0.75])


def test_percentiles_interpolate():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert math.isclose(percentile([0.0, 100.0], 99), 99.0)
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 50) == 0.0
