"""An application's config.json as it is, with proa behind SGLang's command line as its `kt` engine, and a gateway.

One start for all first requests, progress while it loads, and nothing left when the gateway is killed.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from proa.convert.demo_model import ensure_demo_model

QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
    "stream": True,
}
# What `python -m sglang.launch_server` runs in this virtual environment.
PYTHON = f"""#!/bin/sh
test "$1 $2" = "-m sglang.launch_server" || exit 1
shift 2
exec {sys.executable} -P -m proa.launch_server "$@"
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Its process and URL. The test of its death is the last one."""
    directory = tmp_path_factory.mktemp("application")
    model = str(ensure_demo_model())
    python = directory / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    block = {
        "enabled": True, "model_path": model, "kt_weight_path": "", "model_id": "demo-kt",
        "host": "127.0.0.1", "port": 0, "ctx": 2048, "extra_args": "--tp-size 1", "extra_env": "OMP_NUM_THREADS=2",
        "auto_build": False, "venv": str(directory / "venv"),
    }  # fmt: skip
    entry = {"path": model, "backend": "kt", "alias": "demo-entry"}
    (directory / "config.json").write_text(json.dumps({"ktransformers": block}))
    (directory / "models.json").write_text(json.dumps([entry]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = ["gateway", "run", "--config", str(directory / "config.json"), "--progress-interval", "0.1"]
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "proa.cli.main", *run, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: answers(url) or process.poll() is not None, 60)
        yield process, url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/livez", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def wait(condition, seconds: float):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return value


def ask(url: str, model: str) -> httpx.Response:
    body = {**QUESTION, "model": model}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180, trust_env=False)


def test_first_requests_share_one_start_and_are_told_of_it(gateway):
    process, url = gateway
    with ThreadPoolExecutor(8) as pool:
        bodies = [answer.content for answer in pool.map(lambda _: ask(url, "demo-kt"), range(8))]
    (keeper,) = psutil.Process(process.pid).children()
    assert len(keeper.children()) == 1
    assert all(b"Paris" in body and body.endswith(b"data: [DONE]\n\n") for body in bodies)
    assert any(re.search(rb"^: demo-kt: loading( \d+ %)? after \d+ s", body, re.MULTILINE) for body in bodies)


def test_only_names_of_the_configuration_lead_to_an_engine(gateway):
    _, url = gateway
    answer = ask(url, "demo")
    assert answer.status_code == 404
    assert "expected demo-kt | demo-entry, got 'demo'" in answer.json()["error"]["message"]


def test_a_killed_gateway_leaves_no_engine(gateway):
    process, _ = gateway
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 3, "keeper, endpoint and engine"
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive
