"""docs/gateway.md: its commands are run, its file is read, and what there is stands in it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from gateway_process import free_port
from starlette.routing import Route
from typer.main import get_command

from proa.cli.gateway import app
from proa.gateway.routes import ROUTES
from proa.gateway.yaml_config import parse_yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/gateway.md").read_text()
PROA = f"{shlex.quote(sys.executable)} -P -m proa.cli.main"


def block(title):
    """The first code block after a heading."""
    return re.search(rf"## {title}\n.*?```\w*\n(.*?)```", TEXT, re.DOTALL)[1]


def test_the_five_commands_end_with_an_answer(tmp_path):
    setup, *commands = block("Five commands").splitlines()
    assert setup == "make setup" and len(commands) == 4
    port = str(free_port())
    *before, run, ask = (line.split("#")[0].replace(".venv/bin/proa", PROA).replace("8080", port) for line in commands)
    for command in before:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
    arguments = [*shlex.split(run.rstrip(" &")), "--port", port]
    with (tmp_path / "log").open("wb") as log:
        gateway = subprocess.Popen(arguments, cwd=tmp_path, stdout=log, stderr=log)
    try:
        answer = subprocess.run(retried(ask), shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert "Paris" in answer.stdout, answer.stderr + (tmp_path / "log").read_text()
    finally:
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(30) == 0


def retried(command):
    """A person is slower than the second that the gateway takes to listen."""
    return f"for n in 1 2 3 4 5 6 7 8 9; do {command} && break; sleep 0.5; done"


def test_the_example_is_a_configuration():
    config = parse_yaml(block("gateway.yaml"), "docs/gateway.md")
    assert list(config.models) == ["kimi-k2", "deepseek-v3-kt", "small"]


def test_every_command_route_and_deployed_file_is_described():
    for name in get_command(app).commands:
        assert f"gateway {name}" in TEXT or f"`{name} MODEL`" in TEXT, name
    for route in ROUTES:
        assert isinstance(route, Route)
        assert re.sub(r"/\{.*", "", route.path) in TEXT or route.path == "/health", route.path
    for path in re.findall(r"deploy/[\w./-]+", TEXT):
        assert (ROOT / path).exists(), path


def test_the_keys_are_those_of_the_schema():
    sys.path.insert(0, str(ROOT / "scripts"))
    from gen_gateway_keys import DOCUMENT, render

    assert DOCUMENT.read_text() == render(), "make flags"
