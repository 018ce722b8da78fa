"""A model that cannot be served: `proa serve` says why, once, and ends."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proa.convert.demo_model import ensure_demo_model
from proa.convert.demo_path import demo_model_path

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo checkpoint under links, to be damaged."""
    ensure_demo_model()
    directory = tmp_path / "model"
    directory.mkdir()
    for file in demo_model_path().iterdir():
        (directory / file.name).symlink_to(file)
    return directory


def missing_shard(model: Path) -> str:
    (model / SHARD).unlink()
    return f"{SHARD}] expected a file, got nothing"


def truncated_header(model: Path) -> str:
    with (model / SHARD).open("rb") as file:
        data = file.read(5000)
    (model / SHARD).unlink()
    (model / SHARD).write_bytes(data)
    return "expected a header size inside the file"


def unsupported_architecture(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    return "expected model_type out of deepseek_v3, kimi_k2, glm4_moe, qwen3_moe, mixtral"


def unknown_quantization(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    return "got quant_method 'awq'"


def serve(model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "proa.cli.main", "serve", str(model), "--port", port, "--log-level", "warning"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("damage", [missing_shard, truncated_header, unsupported_architecture, unknown_quantization])
def test_the_reason_is_said_once(model: Path, damage):
    reason = damage(model)
    done = serve(model)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and reason in done.stderr
    assert done.stdout == ""


def test_what_does_not_fit_is_refused_with_ways_that_do(model: Path):
    done = serve(model, "--max-total-tokens", "1000000000")
    assert done.returncode == 3, done.stderr
    error, headline, *ways = done.stderr.splitlines()
    assert error.startswith("error: [max_total_tokens] expected 16 to ") and "GiB available" in error
    assert headline.startswith("What makes it fit")
    fitting = re.match(r"  1\. --max-total-tokens (\d+)", ways[0])
    assert fitting is not None and 1024 <= int(fitting[1]) < 10**9, ways
