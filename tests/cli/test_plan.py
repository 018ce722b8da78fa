from __future__ import annotations

import json

import pytest
import torch
from tests.plan.models import KIMI_K2, write_config
from typer.testing import CliRunner

from proa.cli.console import exit_status
from proa.cli.main import app
from proa.core.errors import CheckpointError, ConfigError

runner = CliRunner()
MACHINE = ["--ram", "768", "--vram", "96", "--bandwidth", "500"]
SMALL = KIMI_K2 | {"num_hidden_layers": 3}


def test_json_of_a_model_that_fits(tmp_path):
    result = runner.invoke(app, ["plan", str(write_config(tmp_path, SMALL)), *MACHINE, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"] and found["sizes_from"] == "shapes" and found["ways_to_fit"] == []
    assert found["plan"]["gpu_experts"] == 2 * 384
    assert found["decode"]["range"]["low"] <= found["decode"]["range"]["high"] <= found["decode"]["bound"]
    assert found["flags"][:2] == ["--context-length", "32768"]


def test_tables(tmp_path):
    arguments = ["plan", str(write_config(tmp_path, SMALL)), *MACHINE, "--context", "4096"]
    result = runner.invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for text in ("routed experts", "KV cache", "there is", "decode, 1 at a time", "prefill, 4096 tokens", "proa serve"):
        assert text in result.stdout


def test_a_model_that_does_not_fit_exits_with_1_and_three_ways(tmp_path):
    arguments = ["plan", str(write_config(tmp_path, SMALL)), "--ram", "8", "--vram", "12", "--bandwidth", "50"]
    result = runner.invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 1, result.output
    assert "It does not fit" in result.stdout
    assert "1. " in result.stdout and "more" in result.stdout
    found = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert not found["fits"] and found["refusal"] and 1 <= len(found["ways_to_fit"]) <= 3


@pytest.mark.parametrize(
    ("ram", "vram", "context", "concurrency"),
    [(8, 12, 32768, 1), (64, 12, 131072, 8), (24, 0, 262144, 16), (12, 6, 32768, 4), (3, 24, 8192, 1)],
)
def test_ways_to_fit_fit_when_they_are_followed(tmp_path, ram, vram, context, concurrency):
    """As somebody types them: flags as they stand, hardware added to what was told."""
    path = str(write_config(tmp_path, SMALL))
    machine = {"--ram": ram, "--vram": vram, "--bandwidth": 50, "--context": context, "--concurrency": concurrency}

    def planned(flags):
        words = [str(word) for pair in flags.items() for word in pair]
        result = runner.invoke(app, ["plan", path, *words, "--json"])
        return result.exit_code, json.loads(result.stdout)

    code, found = planned(machine)
    assert code == 1 and 1 <= len(found["ways_to_fit"]) <= 3
    followed = 0
    for way in found["ways_to_fit"]:
        flags, parts = dict(machine), way.split(", ")
        for part in parts:
            words = part.split()
            if words[0].startswith("--"):
                flags |= dict(zip(words[::2], words[1::2], strict=True))
            elif part.endswith("more RAM"):
                flags["--ram"] += int(words[0])
            elif part.endswith("more GPU memory"):
                flags["--vram"] += int(words[0])
            elif words[0] == "a":
                flags["--vram"] = int(words[3])
            else:
                assert part == "everything in RAM" or part.startswith("experts in ")
        if not any(part.startswith("experts in ") for part in parts):  # another model
            followed += 1
            assert planned(flags)[0] == 0, (way, planned(flags)[1]["refusal"])
    assert followed


def test_faults_are_typed(tmp_path):
    result = runner.invoke(app, ["plan", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError) and exit_status(result.exception) == 3
    result = runner.invoke(app, ["plan", str(write_config(tmp_path, SMALL)), "--ram", "-3"])
    assert isinstance(result.exception, ConfigError) and exit_status(result.exception) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_verify_is_of_this_machine(tmp_path):
    result = runner.invoke(app, ["plan", str(write_config(tmp_path, SMALL)), *MACHINE, "--verify"])
    assert exit_status(result.exception) == 2 and "[device] expected a CUDA GPU" in str(result.exception)
