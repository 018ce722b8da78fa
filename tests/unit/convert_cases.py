"""A small model to convert, and conversions in other processes that end in a certain way."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from proa.convert.random_model import RandomDimensions, write_random_model

NUM_LAYERS, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 4, 6, 64, 96
DIMENSIONS = RandomDimensions(HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_EXPERTS, 2, 4, 2, 16, max_positions=256)
LINEARS = 3 * NUM_EXPERTS * NUM_LAYERS


def write_model(
    directory: Path, *, dimensions: RandomDimensions = DIMENSIONS, weight_format: str = "bf16", seed: int = 0
) -> Path:
    """A servable qwen3_moe checkpoint with a vocabulary of 32 words."""
    tokenizer = directory.with_name(f"{directory.name}-tokenizer")
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(32)}}}))
    write_random_model(directory, dimensions, tokenizer, format=weight_format, seed=seed)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# Replaces `requantize` so that `BODY` runs in the Nth call, and converts.
_WORKER = """
import os, resource, signal, sys, threading
from pathlib import Path
import proa.convert.experts as experts

model, method, output, nth = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
requantize, calls, lock = experts.requantize, 0, threading.Lock()

def interrupted(*arguments):
    global calls
    with lock:
        calls += 1
        this = calls
    if this == nth:
        BODY
    return requantize(*arguments)

experts.requantize = interrupted
from proa.cli import console, convert
from proa.core.errors import ProaError
import typer
try:
    SETUP
    convert.run(Path(model), method, Path(output), threads=3)
except typer.Exit as exit_:
    sys.exit(exit_.exit_code)
except ProaError as error:
    console.error(str(error))
    sys.exit(console.exit_status(error))
"""


def convert_in_process(
    model: Path, method: str, output: Path, *, nth: int = 0, body: str = "pass", setup: str = "pass"
) -> subprocess.CompletedProcess[str]:
    """A conversion with 3 threads in which `body` runs before linear number `nth` is converted, `setup` before all."""
    source = _WORKER.replace("BODY", body).replace("SETUP", setup)
    arguments = [sys.executable, "-c", textwrap.dedent(source), str(model), method, str(output), str(nth)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120)
