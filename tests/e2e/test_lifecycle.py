"""How a server ends, and what it survives."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import openai
import psutil
import pytest

MESSAGES = [{"role": "user", "content": "Tell me a long story about the sea."}]


def long_stream(server, tokens):
    """A running stream, after its first event."""
    stream = server.client().chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )
    return stream, next(stream)


def wait_gone(pid, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return
    raise AssertionError(f"process {pid} still runs after {seconds} s")


def test_sigterm_lets_a_running_stream_finish(start_server):
    server = start_server()
    engine = server.engine_pid()
    stream, _ = long_stream(server, 150)
    server.process.send_signal(signal.SIGTERM)
    server.wait_status("/readyz", 503, 5)
    with pytest.raises(openai.APIStatusError) as caught:
        server.client().chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1)
    assert caught.value.status_code == 503
    reasons = [choice.finish_reason for event in stream for choice in event.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert server.process.wait(15) == 0
    wait_gone(engine, 1)


def test_a_second_sigterm_ends_at_once(start_server):
    server = start_server()
    engine = server.engine_pid()
    stream, _ = long_stream(server, 4000)
    server.process.send_signal(signal.SIGTERM)
    server.wait_status("/readyz", 503, 5)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(5)
    wait_gone(engine, 5)
    with suppress(Exception):
        stream.close()


def test_the_server_survives_its_engine_and_the_engine_does_not_survive_the_server(start_server):
    server = start_server()
    first = server.engine_pid()
    stream, _ = long_stream(server, 4000)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    server.wait_status("/readyz", 503, 5)
    assert server.get("/livez").status_code == 200
    server.wait_status("/readyz", 200, 120)
    second = server.engine_pid()
    assert second != first
    answer = server.client().chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4)
    assert answer.usage.completion_tokens == 4

    server.process.kill()
    server.process.wait()
    wait_gone(second, 5)


def test_a_launch_line_of_sglang_serves(start_server):
    line = (
        "--model-path demo --kt-weight-path demo --served-model-name kimi-k2.7-code --host 127.0.0.1 "
        "--mem-fraction-static 0.94 --trust-remote-code --sleep-on-idle --enable-metrics --kt-cpuinfer 24 "
        "--kt-threadpool-count 1 --context-length 2048 --max-running-requests 2 --prefill-max-requests 2 "
        "--max-total-tokens 8192 --kt-num-gpu-experts 8 --kt-method BF16 --kt-gpu-prefill-token-threshold 400 "
        "--kt-max-deferred-experts-per-token 1 --kt-enable-dynamic-expert-update --enable-mixed-chunk "
        "--tensor-parallel-size 1 --disable-shared-experts-fusion --chunked-prefill-size 256 "
        "--attention-backend flashinfer --fp8-gemm-backend triton --reasoning-parser kimi_k2 "
        "--tool-call-parser kimi_k2 --sampling-defaults model"
    )
    server = start_server("-m", "proa.launch_server", *line.split())
    (model,) = server.client().models.list().data
    assert (model.id, model.max_model_len) == ("kimi-k2.7-code", 2048)
    table = server.log.read_text()
    for name, text in (("threadpool-count", "threads are pinned to cores"), ("method +BF16", "Format the routed")):
        assert re.search(f"^  --kt-{name} +{text}", table, re.MULTILINE), table
