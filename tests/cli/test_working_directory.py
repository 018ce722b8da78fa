"""The commands run nothing that lies in the working directory, which may be a model's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proa.cli.serve import _ENGINE_COMMAND

# Imported, directly or not, by the engine, by `proa serve` or by the SGLang front.
NAMES = ("msgspec", "typer", "rich", "numpy", "torch", "zmq", "tokenizers", "pip", "argparse", "difflib")
PROA = Path(sys.executable).with_name("proa")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code from the working directory')")
    return tmp_path


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=directory, input="{}", capture_output=True, text=True, timeout=60)
    assert "code from the working directory" not in done.stderr + done.stdout
    return done


def test_the_engine(hostile: Path):
    done = run(_ENGINE_COMMAND, hostile)
    assert done.returncode == 3 and "expected" in done.stderr


def test_the_server_of_a_chat(hostile: Path):
    done = run([str(PROA), "chat", "no-such-model", "--prompt", "?"], hostile)
    assert done.returncode == 3 and "no-such-model" in done.stderr


def test_the_sglang_front(hostile: Path):
    done = run([sys.executable, "-m", "proa.launch_server", "--model-path", "no-such-model"], hostile)
    assert done.returncode == 3 and "no-such-model" in done.stderr
