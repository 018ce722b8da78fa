"""The numbers of `proa bench serve` and their table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from proa.cli import console
from proa.cli.bench_client import Load, Result

__all__ = ["Distribution", "Report", "percentile", "print_report"]


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Percentile by linear interpolation between the closest ranks; 0 of nothing."""
    if not sorted_values:
        return 0.0
    rank = (len(sorted_values) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A latency over all requests, in milliseconds."""

    mean: float
    median: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution:
        values = sorted(value * 1e3 for value in seconds)
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        return cls(
            statistics.fmean(values), percentile(values, 50), percentile(values, 95), percentile(values, 99), values[-1]
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run. Failed requests count in `failed` and nowhere else."""

    url: str
    model: str
    load: dict[str, Any]
    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    e2e_ms: Distribution
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution

    @classmethod
    def of(cls, results: Sequence[Result], duration_s: float, load: Load, *, model: str, url: str) -> Report:
        good = [result for result in results if not result.error]
        input_tokens = sum(result.input_tokens for result in good)
        output_tokens = sum(result.output_tokens for result in good)
        tpot = [(r.latency_s - r.ttft_s) / (r.output_tokens - 1) for r in good if r.output_tokens > 1]
        settings = asdict(load)
        if settings["request_rate"] == float("inf"):
            settings["request_rate"] = None  # JSON has no infinity
        return cls(
            url=url,
            model=model,
            load=settings,
            completed=len(good),
            failed=len(results) - len(good),
            duration_s=duration_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cached_tokens=sum(result.cached_tokens for result in good),
            request_throughput=len(good) / duration_s,
            input_throughput=input_tokens / duration_s,
            output_throughput=output_tokens / duration_s,
            total_throughput=(input_tokens + output_tokens) / duration_s,
            concurrency=sum(result.latency_s for result in good) / duration_s,
            e2e_ms=Distribution.of([result.latency_s for result in good]),
            ttft_ms=Distribution.of([result.ttft_s for result in good]),
            tpot_ms=Distribution.of(tpot),
            itl_ms=Distribution.of([gap for result in good for gap in result.gaps_s]),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def print_report(report: Report) -> None:
    """The table people know from other servers' benchmarks, on stdout."""
    table = Table(title="Serving benchmark result", show_header=False, title_justify="left", min_width=56)
    table.add_column("what")
    table.add_column("value", justify="right")
    counts = [
        ("Successful requests", f"{report.completed}"),
        ("Failed requests", f"{report.failed}"),
        ("Benchmark duration (s)", f"{report.duration_s:.2f}"),
        ("Total input tokens", f"{report.input_tokens}"),
        ("  of them from the prefix cache", f"{report.cached_tokens}"),
        ("Total generated tokens", f"{report.output_tokens}"),
        ("Request throughput (req/s)", f"{report.request_throughput:.2f}"),
        ("Input token throughput (tok/s)", f"{report.input_throughput:.2f}"),
        ("Output token throughput (tok/s)", f"{report.output_throughput:.2f}"),
        ("Total token throughput (tok/s)", f"{report.total_throughput:.2f}"),
        ("Concurrency", f"{report.concurrency:.2f}"),
    ]
    for name, value in counts:
        table.add_row(name, value)
    for title, name, values in (
        ("End-to-end latency", "E2E", report.e2e_ms),
        ("Time to first token", "TTFT", report.ttft_ms),
        ("Time per output token, the first left out", "TPOT", report.tpot_ms),
        ("Inter-token latency", "ITL", report.itl_ms),
    ):
        table.add_section()
        table.add_row(f"[bold]{title}[/]", "")
        for label, milliseconds in (
            ("Mean", values.mean),
            ("Median", values.median),
            ("P95", values.p95),
            ("P99", values.p99),
            ("Max", values.max),
        ):
            table.add_row(f"{label} {name} (ms)", f"{milliseconds:.2f}")
    console.out.print(table)
