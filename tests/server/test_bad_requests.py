"""What clients get wrong: a typed 400, 404, 405 or 413, and a server that goes on."""

from __future__ import annotations

import json

import httpx
import pytest
import tiny_tokenizer
from server_process import ServerProcess

CHAT = "/v1/chat/completions"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def http(server: ServerProcess):
    with server.client() as client:
        yield client


def chat(fields: str) -> str:
    """A chat completion's body with `fields`, a piece of JSON."""
    return '{"messages":[{"role":"user","content":"hi"}],' + fields + "}"


def check_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> dict:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["message"] and "Traceback" not in error["message"] and len(error["message"]) < 2000
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


NUMBERS = {
    "temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2), "repetition_penalty": (0.1, 100),
}  # fmt: skip
INTEGERS = {
    "n": (1, 128), "max_tokens": (1, 4000), "max_completion_tokens": (1, 4000), "min_tokens": (0, 10),
    "top_k": (-1, 2**31 - 1), "seed": (-(2**63), 2**63 - 1),
}  # fmt: skip
WRONG = ["NaN", "Infinity", "-Infinity", "true", '"1"', "[]", "{}", "1e308", "-1e308", "1" + "0" * 30]


@pytest.mark.parametrize("field", [*NUMBERS, *INTEGERS])
def test_numbers(http: httpx.Client, field: str):
    low, high = (NUMBERS | INTEGERS)[field]
    wrong = [*WRONG, json.dumps(low - 1), json.dumps(high + 1)]
    if field in ("max_tokens", "max_completion_tokens"):
        wrong.remove(json.dumps(high + 1))  # the context is longer; tests below
    if field == "min_tokens":
        wrong.remove(json.dumps(high + 1))
    if field in INTEGERS:
        wrong.append("1.5")
    for value in wrong:
        check_error(http.post(CHAT, content=chat(f'"{field}":{value}')), 400, field)
    edge = http.post(CHAT, content=chat(f'"max_completion_tokens":1,"{field}":{json.dumps(low)}'))
    assert edge.status_code == 200, edge.text
    check_error(http.post(CHAT, content=chat(f'"{field}":' + "9" * 5000)), 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("", "body"),
        ("{", "body"),
        ("[]", "body"),
        ("null", "body"),
        ("\xff\xfe", "body"),
        ("[" * 100_000, "body"),
        ("{}", "messages"),
        ('{"messages":[]}', "messages"),
        ('{"messages":"hi"}', "messages"),
        ('{"messages":[{"role":"user"}]}', "messages.0"),
        ('{"messages":[{"role":"king","content":"hi"}]}', "messages.0.role"),
        ('{"messages":[{"role":"user","content":5}]}', "messages.0.content"),
        ('{"messages":[{"role":"user","content":"a\\u0000b"}]}', "messages.0.content"),
        ('{"messages":[{"role":"user","content":"\\ud800"}]}', "body"),
        ('{"messages":[{"role":"user","content":"\\udc00 tail"}]}', "body"),
        ('{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///x"}}]}]}', None),
        (chat('"stop":5'), "stop"),
        (chat('"stop":[""]'), "stop"),
        (chat('"stop":' + json.dumps(["x"] * 10_000)), "stop"),
        (chat('"stop":"' + "x" * 5000 + '"'), "stop"),
        (chat('"stop_token_ids":[100000]'), "stop_token_ids"),
        (chat('"stop_token_ids":[-1]'), "stop_token_ids.0"),
        (chat('"logit_bias":{"a":1}'), "logit_bias"),
        (chat('"logit_bias":{"100000":1}'), "logit_bias"),
        (chat('"logit_bias":{"5":1000}'), "logit_bias.5"),
        (chat('"logit_bias":{"5":NaN}'), "logit_bias.5"),
        (chat('"logit_bias":' + json.dumps({str(i): 1 for i in range(50_000)})), "logit_bias"),
        (chat('"top_logprobs":5'), "top_logprobs"),
        (chat('"logprobs":true,"top_logprobs":21'), "top_logprobs"),
        (chat('"logprobs":true,"top_logprobs":-1'), "top_logprobs"),
        (chat('"logprobs":1'), "logprobs"),
        (chat('"n":1000000'), "n"),
        (chat('"stream_options":{"include_usage":true}'), "stream_options"),
        (chat('"min_tokens":5,"max_tokens":4'), "min_tokens"),
        (chat('"chat_template_kwargs":{"messages":"x"}'), "chat_template_kwargs"),
        (chat('"chat_template_kwargs":{"a":{"b":1}}'), "chat_template_kwargs.a"),
        (chat('"continue_final_message":true,"add_generation_prompt":true'), "continue_final_message"),
        (chat('"tools":[{"type":"function","function":{"name":"f"}}]'), "tools"),
        (chat('"response_format":{"type":"xml"}'), "response_format.type"),
        (chat('"prompt_logprobs":-1'), "prompt_logprobs"),
    ],
)  # fmt: skip
def test_chat_bodies(http: httpx.Client, body: str, param: str | None):
    check_error(http.post(CHAT, content=body.encode("latin-1")), 400, param)


@pytest.mark.parametrize(
    "field", ["prompt_embeds", "custom_logit_processor", "logits_processors", "lora_path", "chat_template"]
)
@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
def test_forbidden_fields(http: httpx.Client, field: str, route: str):
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 1}
    assert http.post(route, json=body).status_code == 200
    check_error(http.post(route, json={**body, field: "x"}), 400, field, "forbidden_field")


def test_unknown_fields_are_ignored(http: httpx.Client):
    body = {"messages": [{"role": "user", "content": "hi", "odd": 1}], "max_tokens": 1, "unknown": {"a": [1]}}
    assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ('""', "prompt"), ("[]", "prompt"), ("[[]]", "prompt"), ('[""]', "prompt"), ("null", "prompt"), ("5", "prompt"),
        ("[true]", "prompt"), ("[-1]", "prompt"), ("[1e9]", "prompt"), ("[100000]", "prompt"), ('["a",1]', "prompt"),
        ('"a\\u0000"', "prompt"), ('"\\ud83d"', "body"), (json.dumps(["x"] * 129), "prompt"),
    ],
)  # fmt: skip
def test_prompts(http: httpx.Client, prompt: str, param: str):
    error = check_error(http.post("/v1/completions", content='{"prompt":' + prompt + "}"), 400)
    assert error["param"].split(".")[0] == param


@pytest.mark.parametrize("extra", [{"suffix": "x"}, {"best_of": 3}, {"echo": True, "logprobs": 1}, {"logprobs": 21}])
def test_completion_fields(http: httpx.Client, extra: dict):
    check_error(http.post("/v1/completions", json={"prompt": "hi", **extra}), 400)


class TestContext:
    def test_prompt_and_answer(self, http: httpx.Client):
        error = check_error(
            http.post("/v1/completions", json={"prompt": [5] * 100, "max_tokens": 4000}),
            400,
            code="context_length_exceeded",
        )
        assert "100 + 4000 = 4100" in error["message"] and "4096" in error["message"]
        assert http.post("/v1/completions", json={"prompt": [5] * 96, "max_tokens": 1}).status_code == 200

    def test_prompt_alone(self, http: httpx.Client):
        check_error(
            http.post("/v1/completions", json={"prompt": [5] * 4096, "max_tokens": 1}),
            400,
            code="context_length_exceeded",
        )
        message = {"role": "user", "content": "fox " * 5000}
        check_error(http.post(CHAT, json={"messages": [message]}), 400, code="context_length_exceeded")

    def test_ten_megabytes(self, http: httpx.Client, server: ServerProcess):
        before = server.rss_bytes()
        for _ in range(3):
            text = "x" * (10 * MIB)
            check_error(http.post("/v1/completions", json={"prompt": text}), 400, "prompt", "context_length_exceeded")
            error = check_error(http.post(CHAT, json={"messages": [{"role": "user", "content": text}]}), 400)
            assert error["param"] == "messages" and error["code"] == "context_length_exceeded"
        # Bodies come and go; a few copies of one may be alive at a time.
        assert server.rss_bytes() - before < 120 * MIB

    def test_default_is_the_rest(self, http: httpx.Client, server: ServerProcess):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = http.post(CHAT, json=body).json()
        entry = next(entry for entry in server.journal("generate") if entry["rid"].startswith(answer["id"]))
        assert f"max_tokens={4096 - answer['usage']['prompt_tokens']}" in entry["sampling"]


class TestDefaults:
    def test_of_the_model(self, http: httpx.Client, server: ServerProcess):
        answer = http.post(
            CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "top_p": 0.5}
        ).json()
        entry = next(entry for entry in server.journal("generate") if entry["rid"].startswith(answer["id"]))
        for part in ("temperature=0.7", "top_p=0.5", "top_k=20", "stop_token_ids=(2,)"):
            assert part in entry["sampling"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", '{"prompt":[' + '"a",' * 3_000_000 + '"a"]}'),
        ("/v1/completions", '{"prompt":[' + "true," * 2_000_000 + "1]}"),
        ("/v1/completions", '{"prompt":[' + "[]," * 4_000_000 + "[]]}"),
        (CHAT, '{"messages":[' + "{}," * 4_000_000 + "{}]}"),
        (CHAT, '{"messages":[{"role":"user","content":[' + "{}," * 4_000_000 + "{}]}]}"),
        (CHAT, '{"messages":[{"role":"user","content":[' + "{}," * 90_000 + "{}]}]}"),
        (CHAT, '{"messages":"' + '\\"[{' * 3_000_000),
        (CHAT, chat('"stop":[' + '"a",' * 3_000_000 + '"a"]')),
        (CHAT, chat('"stop_token_ids":[' + "-1," * 3_000_000 + "1]")),
        (CHAT, chat('"logit_bias":{' + ",".join(f'"{index}":"x"' for index in range(1_000_000)) + "}")),
        (CHAT, chat('"chat_template_kwargs":{' + ",".join(f'"{index}":[]' for index in range(500_000)) + "}")),
    ],
    ids=lambda value: value[:40],
)
def test_millions_of_items(http: httpx.Client, server: ServerProcess, route: str, body: str):
    before = server.rss_bytes()
    check_error(http.post(route, content=body), 400)
    assert server.rss_bytes() - before < 150 * MIB


def test_unknown_routes_and_methods(http: httpx.Client):
    check_error(http.get("/nothing"), 404, code="not_found")
    check_error(http.get("/v1/../../etc/passwd"), 404)
    check_error(http.get(CHAT), 405, code="method_not_allowed")
    check_error(http.delete("/v1/models"), 405)


def test_template_errors_are_the_clients(start_server, tmp_path):
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('only one message') }}{% endif %}{{ messages[0].content }}"
    )
    server = start_server(model=tiny_tokenizer.write_model(tmp_path / "strict", template=template))
    message = {"role": "user", "content": "hi"}
    with server.client() as client:
        assert client.post(CHAT, json={"messages": [message], "max_tokens": 1}).status_code == 200
        error = check_error(client.post(CHAT, json={"messages": [message, message]}), 400, "messages", "template_error")
        assert "only one message" in error["message"]
