"""`proa gateway`: its commands, from a new file to a model that answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from gateway_process import HERE, PLAIN, free_port
from typer.testing import CliRunner

from proa.cli.main import app
from proa.core.errors import ConfigError
from proa.gateway.config_file import read_config

FAKE = [sys.executable, "-S", "-E", str(HERE / "fake_engine.py"), "--port", "${PORT}"]


def invoke(*words):
    return CliRunner().invoke(app, ["gateway", *map(str, words)])


def test_init_writes_a_file_that_runs_the_demo_model_and_overwrites_none(tmp_path):
    path = tmp_path / "gateway.yaml"
    assert invoke("init", "--config", path).exit_code == 0
    (model,) = read_config(path).models.values()
    assert (model.name, model.backend, model.path) == ("demo", "proa", "demo")
    again = invoke("init", "--config", path)
    assert isinstance(again.exception, ConfigError) and "a new file" in str(again.exception)
    assert isinstance(invoke("init", "--config", tmp_path / "no/such").exception, ConfigError)


def test_what_the_new_file_suggests_is_right_too(tmp_path):
    path = tmp_path / "gateway.yaml"
    assert invoke("init", "/models/Qwen3 30B: 'A3B'", "--config", path).exit_code == 0
    text = path.read_text()
    path.write_text(re.sub(r"(?m)^( *)#(?=[a-z ])(?! )", r"\1", re.sub(r"(?m)^( *)#(?=  \w)", r"\1", text)))
    assert "#ttl" not in path.read_text()
    (model,) = read_config(path).models.values()
    assert model.path == "/models/Qwen3 30B: 'A3B'" and model.ttl == 7200.0
    assert list(model.aliases) == [f"{model.name}-precise"]


def test_check_shows_commands_without_secrets_or_says_line_and_key(tmp_path):
    path = tmp_path / "gateway.yaml"
    models = {
        "kimi": {"path": "/m/kimi", "kt_weight_path": "/m/int4", "aliases": ["k2"]},
        "sg": {"backend": "kt", "path": "/m/x"},
    }
    path.write_text(yaml.safe_dump({"models": models}))
    described = json.loads(invoke("check", "--config", path, "--json").stdout)["models"]
    assert [(model["name"], model["aliases"], model["backend"]) for model in described] == [
        ("kimi", ["k2"], "proa"),
        ("sg", [], "kt"),
    ]
    assert "--kt-weight-path" in described[0]["command"]
    sglang = described[1]["command"]
    assert sglang[sglang.index("--api-key") + 1] == "KEY"
    assert "kimi" in invoke("check", "--config", path).stdout
    path.write_text("models:\n  a:\n    path: x\n    tttl: 5m\n")
    wrong = invoke("check", "--config", path)
    assert wrong.exit_code != 0 and "line 4: models.a.tttl" in str(wrong.exception) and "ttl" in str(wrong.exception)
    assert isinstance(invoke("check", "--config", tmp_path / "none.yaml").exception, ConfigError)


def test_without_a_gateway_the_client_commands_say_how_to_start_one():
    failed = invoke("status", "--url", f"http://127.0.0.1:{free_port()}")
    assert failed.exit_code == 1 and "proa gateway run" in str(failed.exception)


class Running:
    """`proa gateway run` with a file of its own."""

    def __init__(self, directory: Path):
        self.path = directory / "gateway.yaml"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "log"
        self.write(m={})
        command = [sys.executable, "-m", "proa.cli.main", "gateway", "run", "--config", str(self.path)]
        environment = {**os.environ, "PROA_API_KEY": "key"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=log, stderr=log, env=environment
            )
        self.wait(lambda: self.get("/livez") == 200)

    def write(self, **models):
        common = {"backend": "command", "command": FAKE, "ready_path": "/health"}
        text = yaml.safe_dump({"models": {name: {**common, **own} for name, own in models.items()}})
        self.path.with_suffix(".new").write_text(text)
        self.path.with_suffix(".new").rename(self.path)

    def get(self, path):
        try:
            return httpx.get(self.url + path, headers={"x-api-key": "key"}, **PLAIN).status_code
        except httpx.TransportError:
            assert self.process.poll() is None, self.log.read_text()
            return None

    def wait(self, condition, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def invoke(self, *words):
        return invoke(*words, "--url", self.url, "--api-key", "key")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    gateway = Running(tmp_path_factory.mktemp("run"))
    yield gateway
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(15) == 0, gateway.log.read_text()
    assert "Traceback" not in gateway.log.read_text()


def test_a_model_is_loaded_shown_read_and_unloaded(running):
    assert "stopped" in running.invoke("status").stdout
    loaded = running.invoke("load", "m")
    assert loaded.exit_code == 0 and "m is ready after" in loaded.stdout
    shown = running.invoke("status").stdout
    assert "ready" in shown and "command" in shown
    assert "ready" in running.invoke("logs", "m", "--lines", "2").stdout.splitlines()
    assert "m is stopped" in running.invoke("unload", "m").stdout
    assert "stopped" in running.invoke("status").stdout


def test_what_the_gateway_refuses_is_said_in_its_words(running):
    for words in (("load", "other"), ("unload", "other"), ("logs", "other"), ("logs", "other", "--follow")):
        failed = running.invoke(*words)
        assert failed.exit_code == 1 and "expected m, got 'other'" in str(failed.exception), words
    unauthorized = invoke("status", "--url", running.url, "--api-key", "wrong")
    assert "API key" in str(unauthorized.exception)


def test_a_changed_file_is_used_and_a_wrong_one_is_not(running):
    running.write(m={}, n={"aliases": ["new"]})
    running.wait(lambda: running.get("/v1/models/new") == 200)
    running.path.write_text("models: [")
    running.wait(lambda: "the configuration in use stays" in running.log.read_text())
    assert running.get("/v1/models/new") == 200
    running.write(m={})
    running.wait(lambda: running.get("/v1/models/new") == 404)
