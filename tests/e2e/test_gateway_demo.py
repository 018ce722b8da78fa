"""A gateway with a real `proa serve demo`: started by the first request, passed through, aborted, never orphaned."""

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
    "stream_options": {"include_usage": True},
}
# What differs between two answers of the same engine.
OWN = re.compile(rb'"id":\s?"[^"]+"|"created":\s?\d+')


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


def ask(url: str, **headers: str) -> bytes:
    answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, headers=headers, timeout=180, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.content


def engine(url: str) -> tuple[str, dict[str, str], int]:
    """Address, headers and process of the running engine. Its key is in its environment and nowhere else."""
    (status,) = httpx.get(f"{url}/models", trust_env=False).json()["models"]
    entries = Path(f"/proc/{status['pid']}/environ").read_text().split("\0")
    (key,) = (entry.removeprefix("PROA_API_KEY=") for entry in entries if entry.startswith("PROA_API_KEY="))
    return status["base_url"], {"authorization": f"Bearer {key}"}, status["pid"]


def test_first_requests_share_one_start_and_are_told_of_it(gateway):
    process, url = gateway
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda _: ask(url), range(8)))
    (keeper,) = psutil.Process(process.pid).children()
    assert len(keeper.children()) == 1
    assert any(re.search(rb"^: demo: loading \d+ % after \d+ s, ETA \d+ s", body, re.MULTILINE) for body in bodies)
    assert all(b"Paris" in body and body.endswith(b"data: [DONE]\n\n") for body in bodies)


def test_bytes_are_those_of_the_engine(gateway):
    _, url = gateway
    address, headers, _ = engine(url)
    direct = httpx.post(
        f"{address}/v1/chat/completions",
        json={**QUESTION, "model": "demo", "seed": 1}, headers=headers, timeout=60, trust_env=False,
    )  # fmt: skip
    assert direct.status_code == 200
    assert OWN.sub(b"", ask(url)) == OWN.sub(b"", direct.content)
    assert httpx.get(f"{address}/v1/models", trust_env=False).status_code == 401


def test_a_client_that_leaves_frees_its_slot_within_a_second(gateway):
    _, url = gateway
    address, headers, _ = engine(url)

    def num_running() -> float:
        text = httpx.get(f"{address}/metrics", headers=headers, trust_env=False).text
        (line,) = (line for line in text.splitlines() if line.startswith("sglang:num_running_reqs"))
        return float(line.rsplit(" ", 1)[1])

    long = {**QUESTION, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=60, trust_env=False) as stream:
        chunks = stream.iter_bytes()  # closes the stream when nobody holds it
        next(chunks)
        wait(lambda: num_running() == 1, 10)
    wait(lambda: num_running() == 0, 1.0)
    (status,) = httpx.get(f"{url}/models", trust_env=False).json()["models"]
    assert (status["running"], status["state"]) == (0, "ready")


def test_a_killed_gateway_leaves_no_engine(gateway):
    process, _ = gateway
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 3, "keeper, endpoint and engine"
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive
