"""A gateway with a real `proa serve demo`: one start for all first requests, and nothing left when it is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

HELPERS = Path(__file__).parents[1] / "gateway"
QUESTION = {
    "model": "france",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
    "stream": True,
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Its process and URL. The test of its death is the last one."""
    sys.path.insert(0, str(HELPERS))
    from gateway_process import free_port

    port = free_port()
    model = {"name": "demo", "backend": "proa", "path": "demo", "command": [], "aliases": {"france": {"seed": 1}}}
    settings = {"gateway": {"port": port}, "models": [model], "http": {"progress_interval": 0.1}}
    log = tmp_path_factory.mktemp("gateway") / "log"
    with log.open("wb") as file:
        command = [sys.executable, str(HELPERS / "run_gateway.py"), json.dumps(settings)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
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


def ask(url: str) -> bytes:
    answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=180, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_first_requests_share_one_start_and_are_told_of_it(gateway):
    process, url = gateway
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda _: ask(url), range(8)))
    (keeper,) = psutil.Process(process.pid).children()
    assert len(keeper.children()) == 1
    assert any(re.search(rb"^: demo: loading \d+ % after \d+ s, ETA \d+ s", body, re.MULTILINE) for body in bodies)
    assert all(b"Paris" in body and body.endswith(b"data: [DONE]\n\n") for body in bodies)


def test_a_killed_gateway_leaves_no_engine(gateway):
    process, _ = gateway
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 3, "keeper, endpoint and engine"
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive
