"""A plan beside a run of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.core.errors import ConfigError
from proa.device.select import Gpu
from proa.engine.config import EngineConfig
from proa.plan.estimate import estimate_decode
from proa.plan.hardware import GIB, Machine
from proa.plan.memory_plan import Wanted, plan_memory
from proa.plan.model_sizes import read_sizes
from proa.plan.trial import Mark, Timed, Trial, resident_bytes, run_trial
from proa.plan.verify import compare_memory, compare_speed

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.2 GiB, so that 5 % are more than what the interpreter takes more or less."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"t{i}": i for i in range(4096)}}}))
    dimensions = replace(
        DIMENSIONS["tiny"], hidden_size=1024, moe_intermediate_size=768, num_layers=4, num_experts=64, num_heads=16
    )
    directory = tmp_path_factory.mktemp("model") / "medium"
    write_random_model(directory, dimensions, tokenizer)
    return directory


def test_the_plan_of_a_run_on_the_cpu_is_within_5_percent(model: Path) -> None:
    """In a process of its own, whose resident set is its own."""
    command = [sys.executable, "-m", "proa.cli.main", "plan", str(model), "--vram", "0", "--bandwidth", "50"]
    arguments = ["--context", "2048", "--concurrency", "2", "--verify", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    # Speed on a machine that others use too is not a test's to judge.
    assert done.returncode in (0, 1), done.stdout + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {pace["name"]: pace["tokens"] for pace in found["timed"]} == {"decode": 2, "prefill": 768}
    assert all(pace["actual"] > 0 for pace in found["timed"])
    rows = {row["name"]: row for row in found["verified"]}
    assert abs(rows["total"]["deviation"]) <= 0.05
    assert rows["total"]["actual"] > 1.2 * GIB


def test_comparisons_on_a_gpu(model: Path) -> None:
    """Stages add up to the total; the reserve is no prediction of what is taken."""
    sizes = read_sizes(model)
    plan = plan_memory(sizes, Machine(64 * GIB, 50.0, int(4 * GIB)), Wanted(2048, 2))
    assert plan.uses_gpu and plan.gpu_experts == sizes.info.experts.layers * 64
    stages = {"start": (500, 900), "loaded": (2000, 1000), "cache": (2100, 1000), "built": (2200, 1100)}
    marks = {name: Mark(gpu * MIB, ram * MIB) for name, (gpu, ram) in (stages | {"end": (2300, 1300)}).items()}
    rows = compare_memory(sizes, plan, Trial(marks, 100, Timed(1, 1, 1.0), Timed(1, 1, 1.0)))
    gpu = {row.name: row for row in rows if row.device == "GPU"}
    assert gpu["total"].actual == sum(row.actual for name, row in gpu.items() if name != "total") == 1800 * MIB
    assert gpu["total"].predicted == sum(row.predicted for name, row in gpu.items() if name != "total")
    assert gpu["total"].predicted == sum(plan.vram.values()) - plan.vram["reserve"]
    ram = {row.name: row for row in rows if row.device == "RAM"}
    assert ram["total"].actual == 1300 * MIB
    assert ram["total"].deviation == pytest.approx(ram["total"].predicted / (1300 * MIB) - 1)


def test_speeds_are_those_of_what_ran(model: Path) -> None:
    """Not of the whole context that was planned for."""
    sizes, machine = read_sizes(model), Machine(64 * GIB, 50.0)
    plan = plan_memory(sizes, machine, Wanted(2048, 4))
    expected = estimate_decode(sizes, replace(plan, context=88, concurrency=2), machine)
    step = 2 / expected.range.high * 1.01
    trial = Trial({}, 100, Timed(768, 768, 1e-9), Timed(2, 88, step))
    decode, prefill = compare_speed(sizes, plan, machine, trial)
    assert decode.estimate == expected and decode.is_expected and decode.actual == pytest.approx(2 / step)
    assert not prefill.is_expected and prefill.tokens == 768


def test_a_share_of_a_gpu_that_is_not_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_memory(read_sizes(model), Machine(64 * GIB, 50.0, 4 * GIB), Wanted(2048, 2))
    monkeypatch.setattr("proa.plan.trial.choose_gpu", lambda _: Gpu(0, "GPU", 3 * GIB, 8 * GIB))
    with pytest.raises(ConfigError, match=r"\[--vram\] expected at most the 3.00 GiB that are free here, got 4.00"):
        run_trial(model, plan, vram_bytes=4 * GIB)


def test_the_engine_of_a_plan_has_its_flags(model: Path) -> None:
    plan = plan_memory(read_sizes(model), Machine(64 * GIB, 50.0), Wanted(2048, 2))
    config = plan.config
    assert EngineConfig.from_json(config.to_json()) == config
    assert (config.context_length, config.max_running_requests, config.max_total_tokens) == (2048, 2, 4096)
    assert plan.flags[-2:] == ["--device", "cpu"]


def test_resident_bytes(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t 900 kB\nVmRSS:\t     700 kB\n")
    assert resident_bytes(tmp_path) == 700 * 1024
    (tmp_path / "status").write_text("Name: x\n")
    with pytest.raises(OSError, match="VmRSS"):
        resident_bytes(tmp_path)
