"""Runs tests/gpu and appends what came of each file, and on what machine, to benchmarks/results/gpu_tests.jsonl.

python scripts/gpu_tests.py [--output FILE] [arguments of pytest, such as -n 12 or a file of tests/gpu]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


class Results:
    """A pytest plugin; where tests run in several processes it sees the reports of all."""

    def __init__(self) -> None:
        self.files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.files[report.nodeid.partition("::")[0]][report.outcome] += 1
        if report.outcome == "failed":
            self.failed.append(report.nodeid)


def machine() -> dict[str, str]:
    """GPU, driver, and the versions that compile its kernels."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {"gpu": gpu, "torch": torch.__version__, **{name: version(name) for name in ("triton", "transformers")}}


def commit() -> str:
    """Of the tree; `-dirty` where files differ."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> int:
    """Runs the tests and writes the line; pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu_tests.jsonl")
    options, arguments = parser.parse_known_args()
    results = Results()
    if not any(argument.startswith("tests/") for argument in arguments):
        arguments.append("tests/gpu")
    status = pytest.main(arguments, plugins=[results])
    line = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "commit": commit(),
        **machine(),
        "complete": status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        "files": {name: dict(counts) for name, counts in sorted(results.files.items())},
        "failed": sorted(results.failed),
    }
    with options.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
