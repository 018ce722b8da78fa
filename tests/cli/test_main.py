from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from proa import __version__
from proa.cli import console, main
from proa.core.errors import CheckpointError, ConfigError, ProaError, UnavailableError, UnsupportedError


@pytest.mark.parametrize(
    ("failure", "status"),
    [(ConfigError, 2), (UnsupportedError, 2), (CheckpointError, 3), (UnavailableError, 1), (ProaError, 1)],
)
def test_a_failure_is_one_line_and_a_status(monkeypatch, capsys, failure, status):
    def fail():
        raise failure("[here]", "a [b]", "c")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    assert exit_info.value.code == status
    assert capsys.readouterr().err == "error: [[here]] expected a [b], got c.\n"


@pytest.mark.parametrize("command", [["serve", "no-such-model"], ["chat", "no-such-model", "--prompt", "?"]])
def test_a_missing_model_ends_both_commands_alike(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "proa.cli.main", *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "expected a directory with config.json at no-such-model, got nothing there" in done.stderr


def test_version():
    assert CliRunner().invoke(main.app, ["--version"]).stdout == f"proa {__version__}\n"


def test_help_text_keeps_examples_and_joins_paragraphs():
    assert console.help_text("One\n    two.\n\n    Examples:\n\n        proa x\n\n        proa y") == (
        "One two.\n\nExamples:\n\n    proa x\n\n    proa y"
    )
