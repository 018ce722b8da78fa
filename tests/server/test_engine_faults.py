"""Steps that fail or never end, seen through the endpoint: the real engine process around a fake model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from server_process import ServerProcess
from tests.engine.fake_model import HANG, NO_GPU_MEMORY, NO_RAM

ENGINE = Path(__file__).parents[1] / "engine" / "fake_model_engine.py"
PROMPT = [21, 22, 23, 24]


def completion(server: ServerProcess, prompt: list[int], **options):
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server.client() as client:
        return client.post("/v1/completions", json={**body, **options})


@pytest.fixture
def start_engine(start_server):
    def start(**server):
        config = {"model_path": "", "max_total_tokens": 4096, "block_size": 4}
        return start_server(engine_script=str(ENGINE), engine=config, server={"restart_backoff": 0.1, **server})

    return start


@pytest.mark.parametrize(("token", "where"), [(NO_GPU_MEMORY, "GPU memory"), (NO_RAM, "RAM")])
def test_out_of_memory_is_a_503_for_one_request(start_engine, token: int, where: str) -> None:
    server = start_engine()
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(completion, server, [*PROMPT, 30 + i], logprobs=1, max_tokens=200) for i in range(5)]
        time.sleep(0.1)
        failed = pool.submit(completion, server, [*PROMPT, token]).result()
        answers = [other.result() for other in others]
    assert failed.status_code == 503 and int(failed.headers["retry-after"]) > 0
    error = failed.json()["error"]
    assert error["type"] == "service_unavailable" and set(error) == {"message", "type", "param", "code"}
    assert f"[{where}] expected room for a step" in error["message"]
    for answer in answers:
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 200
    assert len(server.journal("started")) == 1
    with server.client() as client:
        text = client.get("/metrics").text
    assert 'proa:out_of_memory_total{model_name="tiny"}' in text
    assert 'proa:out_of_memory_total{model_name="tiny"} 0.0' not in text


def test_a_layer_that_never_ends(start_engine) -> None:
    server = start_engine(watchdog_timeout=1.5)
    first = server.engine_pid()
    answers = []
    threads = [
        threading.Thread(target=lambda p=prompt: answers.append(completion(server, p, max_tokens=2000)))
        for prompt in (PROMPT, [*PROMPT, HANG])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [503, 503]
    for answer in answers:
        assert "no sign of life for 1.5 s and was killed" in answer.json()["error"]["message"]
    server.wait(lambda: len(server.journal("started")) == 2)
    server.wait_ready()
    log = server.log()
    assert "Current thread" in log and 'fake_model.py", line' in log, (
        "the stack of the thread that holds the interpreter"
    )
    assert f"the engine process {first} hangs; its threads: " in log
    assert not psutil.pid_exists(first)
    again = completion(server, PROMPT)
    assert again.status_code == 200 and again.json()["usage"]["completion_tokens"] == 20
