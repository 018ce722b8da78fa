"""proa's own server behind the gateway: real model, real stream. What it wrote is recorded between the two."""

from __future__ import annotations

import json
import re
import sys

import httpx
import openai
import pytest
import raw_http
from gateway_process import HERE, PLAIN, GatewayProcess
from raw_http import call, connect

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODIES = {
    "/v1/chat/completions": {
        "messages": QUESTION,
        "max_tokens": 12,
        "logprobs": True,
        "tools": [TOOL],
        "tool_choice": "none",
    },
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 12},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 12},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 12},
    "/tokenize": {"prompt": "The sea"},
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, records):
    command = [sys.executable, str(HERE / "recording_engine.py"), "${PORT}", str(records)]
    fields = {"command": command, "env": {"PROA_API_KEY": "${API_KEY}"}, "ready_path": "/readyz"}
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), {"demo": []}, fields={"demo": fields})
    process.wait_ready()
    assert httpx.post(process.url + "/models/load", json={"model": "demo"}, timeout=180, **PLAIN).status_code == 200
    yield process
    assert process.stop() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


def recorded(records, request_id):
    """What the engine wrote for a request."""
    mark = f"x-request-id: {request_id}\r\n".encode()
    (answer,) = [data for file in records.glob("*.answer") if mark in (data := file.read_bytes())]
    return raw_http.parse_answer(answer)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
def test_bytes_are_those_that_the_engine_wrote(gateway, records, path, stream):
    request_id = f"{path}-{stream}"
    answer = call(gateway.port, path, {"model": "demo", "stream": stream, **BODIES[path]}, x_request_id=request_id)
    written = recorded(records, request_id)
    assert answer.status == written.status == 200, answer.body
    assert answer.body == written.body and len(answer.body) > 20
    assert answer.end_to_end() == written.end_to_end()
    assert answer.header("x-request-id") == request_id


def test_an_openai_client_gets_its_answer_and_its_errors(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=24, temperature=0)
        assert "Paris" in answer.choices[0].message.content
        assert [model.id for model in client.models.list()] == ["demo"]
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=-1)
        with pytest.raises(openai.NotFoundError, match="demo"):
            client.chat.completions.create(model="demo2", messages=QUESTION)


def test_the_engine_takes_requests_from_its_gateway_only(gateway):
    base_url = gateway.status("demo")["base_url"]
    assert httpx.get(f"{base_url}/v1/models", **PLAIN).status_code == 401


def test_a_client_that_leaves_frees_the_slot(gateway):
    def running() -> float:
        text = gateway.get("/upstream/demo/metrics").text
        return float(re.search(r"sglang:num_running_reqs\{.*\} (\S+)", text)[1])

    body = {"model": "demo", "stream": True, "messages": QUESTION, "max_tokens": 4000, "ignore_eos": True}
    connection = connect(gateway.port, "/v1/chat/completions", body)
    assert b"200 OK" in connection.recv(100)
    gateway.wait(lambda: running() == 1.0, "the request")
    connection.close()
    gateway.wait(lambda: running() == 0.0, "a free slot", 1.5)


def test_what_it_loads_is_reported(gateway):
    assert json.loads(gateway.get("/upstream/demo/readyz").text)["status"] == "ok"
    assert "ready after" in gateway.get("/logs/demo").text
