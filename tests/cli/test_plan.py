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


def test_faults_are_typed(tmp_path):
    result = runner.invoke(app, ["plan", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError) and exit_status(result.exception) == 3
    result = runner.invoke(app, ["plan", str(write_config(tmp_path, SMALL)), "--ram", "-3"])
    assert isinstance(result.exception, ConfigError) and exit_status(result.exception) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_verify_is_of_this_machine(tmp_path):
    result = runner.invoke(app, ["plan", str(write_config(tmp_path, SMALL)), *MACHINE, "--verify"])
    assert exit_status(result.exception) == 2 and "[device] expected a CUDA GPU" in str(result.exception)
