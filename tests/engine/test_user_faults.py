"""The real engine process on what a user can get wrong: a Fatal that says so, exit status 3, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.engine.config import EngineConfig
from proa.engine.loop import EXIT_USER
from proa.ipc.messages import Fatal, FromEngine
from proa.ipc.transport import EngineAddresses

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"t{i}": i for i in range(64)}}}))
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_random_model(directory, DIMENSIONS["tiny"], tokenizer)
    return directory


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """The checkpoint with other values in its config.json."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **changes}))
    return target


def run_engine_process(
    directory: Path, environment: dict[str, str], **config: Any
) -> tuple[int, str, list[FromEngine]]:
    """Exit status, standard error and messages of an engine that ends by itself."""
    directory.mkdir(mode=0o700)
    addresses = EngineAddresses.in_directory(directory)
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(addresses.from_engine)
    data = EngineConfig(to_engine=addresses.to_engine, from_engine=addresses.from_engine, **config).to_json()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "proa.engine"],
            input=data,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **environment},
        )
        messages = []
        while inbox.poll(200):
            messages.append(msgspec.msgpack.decode(inbox.recv(), type=FromEngine))
    finally:
        inbox.close()
        context.term()
    return result.returncode, result.stderr.decode(), messages


Case = tuple[Callable[[Path, Path], Path], dict[str, str], dict[str, Any], str]

CASES: dict[str, Case] = {
    "wrong ISA": (lambda good, _: good, {"PROA_FORCE_ISA": "sse9"}, {}, "PROA_FORCE_ISA"),
    "no directory": (lambda _, new: new, {}, {}, "expected a checkpoint directory"),
    "path too long": (lambda _, new: new / ("x" * 5000), {}, {}, "File name too long"),
    "unknown architecture": (lambda good, new: edited(good, new, model_type="gpt_oss"), {}, {}, "deepseek_v3, kimi_k2"),
    "lying config": (lambda good, new: edited(good, new, num_experts=9), {}, {}, "mlp.gate.weight"),
    "too many threads": (lambda good, _: good, {}, {"num_threads": 10_000}, "[threads]"),
    "too much KV": (lambda good, _: good, {}, {"max_total_tokens": 2**50}, "GiB available"),
    "more context than the model has": (lambda good, _: good, {}, {"context_length": 4096}, "2048, the model's limit"),
}


@pytest.mark.parametrize("name", CASES)
def test_user_faults_end_the_engine_with_a_message(checkpoint: Path, tmp_path: Path, name: str) -> None:
    make, environment, config, text = CASES[name]
    model = make(checkpoint, tmp_path / "model")
    status, stderr, messages = run_engine_process(tmp_path / "sockets", environment, model_path=str(model), **config)
    assert status == EXIT_USER, stderr[-2000:]
    assert "Traceback" not in stderr
    fatal = messages[-1]
    assert isinstance(fatal, Fatal) and fatal.user and text in fatal.message
    assert fatal.is_shortage == (name == "too much KV")
