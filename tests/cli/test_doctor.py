from __future__ import annotations

import json
import os

from typer.testing import CliRunner

from proa.cli.main import app
from proa.native import _C

runner = CliRunner()


def test_json_describes_this_machine():
    result = runner.invoke(app, ["doctor", "--json", "--no-bandwidth"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    cpus = {entry["cpu"] for entry in found["cpu"]["cpus"]}
    assert cpus == os.sched_getaffinity(0)
    assert set(found["cpu"]["physical_cpus"]) <= cpus
    assert 0 < found["ram_available_bytes"] <= found["ram_total_bytes"]
    assert found["read_gb_s"] is None
    assert set(found["kernels"]) == set(_C.weight_formats())
    assert set(found["self_test"].values()) == {""}


def test_one_kernel_per_format_is_chosen_and_each_other_has_a_reason():
    found = json.loads(runner.invoke(app, ["doctor", "--json", "--no-bandwidth"]).stdout)
    for rows in found["kernels"].values():
        assert sum(row["chosen"] for row in rows) == (1 if rows else 0)
        assert all(row["reason"] for row in rows if not row["chosen"])


def test_a_kernel_that_fails_its_self_test_is_shown(monkeypatch):
    linear = _C.linear

    def broken(*arguments):
        linear(*arguments)
        arguments[3][0, 0] += 1

    monkeypatch.setattr(_C, "linear", broken)
    result = runner.invoke(app, ["doctor", "--no-bandwidth"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "fails its self-test" in result.stdout


def test_table_shows_a_measured_bandwidth():
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("Instruction sets", "NUMA node 0", "Huge pages", "GB/s", "int4_g32"):
        assert word in result.stdout
