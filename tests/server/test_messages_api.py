"""Anthropic's API in front of a Kimi model, through the anthropic SDK."""

from __future__ import annotations

import json

import anthropic
import pytest
from fake_engine import ANSWER_SEED, SLOW_SEED
from kimi_model import AB, CB, CE, SB, SE, TE, scripted_server
from server_process import KEY

TOOL: dict = {
    "name": "weather",
    "description": "Weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
OSLO = '{"place":"Oslo é 🙂"}'
CALL = f"{CB}functions.weather:0{AB}{OSLO}{CE}"
ANSWERS = [
    f"why{TE}Hello.",
    f"why{TE}On it.{SB}{CALL}{CALL}{SE} and then",
    f"{TE}one STOP two",
    f"why{SB}{CB}functions.weather:0{AB}not json{CE}{SE}",
    f"{TE}",
]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("kimi"), ANSWERS, keepalive_interval=0.25) as process:
        yield process


@pytest.fixture
def client(kimi):
    with anthropic.Anthropic(base_url=kimi.url, api_key=KEY, max_retries=0) as client:
        yield client


def fields(number, **more):
    messages = more.pop("messages", [{"role": "user", "content": "Weather?"}])
    seed = {"seed": ANSWER_SEED + number}
    return {"model": "tiny", "max_tokens": 1000, "messages": messages, "tools": [TOOL], "extra_body": seed, **more}


def prompt_of(kimi, body):
    """The prompt that /v1/chat/completions would write for the OpenAI form of a conversation."""
    with kimi.client() as http:
        ids = http.post("/tokenize", json=body).json()["tokens"]
        return http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


EXPECTED = [
    ([("thinking", "why"), ("text", "Hello.")], "end_turn", None),
    (
        [
            ("thinking", "why"), ("text", "On it."), ("tool_use", json.loads(OSLO)), ("tool_use", json.loads(OSLO)),
            ("text", " and then"),
        ],
        "tool_use", None,
    ),
    ([("thinking", ""), ("text", "one ")], "stop_sequence", "STOP"),
    ([("thinking", "why"), ("tool_use", {"INVALID_JSON": "not json"})], "tool_use", None),
    ([("thinking", "")], "end_turn", None),
]  # fmt: skip


def blocks_of(message):
    return [(b.type, b.input if b.type == "tool_use" else getattr(b, b.type)) for b in message.content]


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_whole_and_streamed(client, number):
    expected = EXPECTED[number]
    request = fields(number, stop_sequences=["STOP"])
    whole = client.messages.create(**request)
    assert (blocks_of(whole), whole.stop_reason, whole.stop_sequence) == expected
    assert whole.id.startswith("msg_") and whole.role == "assistant" and whole.model == "tiny"
    with client.messages.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert (blocks_of(final), final.stop_reason, final.stop_sequence) == expected
    assert final.usage.model_dump() == whole.usage.model_dump()
    calls = [block for message in (whole, final) for block in message.content if block.type == "tool_use"]
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id.replace("_", "").isalnum() and len(call.id) <= 64 for call in calls)
    thoughts = [block for block in final.content if block.type == "thinking"]
    assert all(block.signature for block in thoughts)
    assert events[0].type == "message_start" and events[-1].type == "message_stop"
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counted = {key: value for key, value in request.items() if key in ("model", "messages", "tools")}
    assert client.messages.count_tokens(**counted).input_tokens == total


def test_events_on_the_wire(kimi):
    body = {**fields(1), "stream": True, "seed": ANSWER_SEED + 1}
    body.pop("extra_body")
    with kimi.client() as http:
        frames = http.post("/v1/messages", json=body).text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    is_open, index = False, -1
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == index + 1
            is_open, index = True, index + 1
        else:
            assert is_open and event["index"] == index
            is_open = event["type"] != "content_block_stop"
    parts = [event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("partial_json")]
    assert "".join(parts) == OSLO * 2


def test_arguments_that_are_no_object_come_back_as_they_were(kimi, client):
    message = client.messages.create(**fields(3))
    assert blocks_of(message) == EXPECTED[3][0]
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "bad input", "is_error": True}
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    count = client.messages.count_tokens(model="tiny", messages=turns).input_tokens
    call = {"id": "x", "function": {"name": "weather", "arguments": "not json"}}
    same = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "Error: bad input"},
    ]
    with kimi.client() as http:
        assert http.post("/tokenize", json={"messages": same}).json()["count"] == count


def test_thinking_is_turned_off(client):
    message = client.messages.create(**fields(4, thinking={"type": "disabled"}))
    assert blocks_of(message) == []
    message = client.messages.create(**fields(4, thinking={"type": "enabled", "budget_tokens": 1024}))
    assert blocks_of(message) == [("thinking", "")]


def test_a_last_turn_of_the_assistant_is_continued(client):
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "It is"}]
    assert blocks_of(client.messages.create(**fields(0, messages=messages))) == [("text", "whyHello.")]
    # One that says nothing begins nothing.
    for nothing in ("", [], [{"type": "thinking", "thinking": "x", "signature": "s"}]):
        messages[-1]["content"] = nothing
        answer = client.messages.create(**fields(0, messages=messages))
        assert blocks_of(answer) == [("thinking", "why"), ("text", "Hello.")]


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "none"}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}},
        {"tools": [], "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
)
def test_what_constrains_the_answer(kimi, client, more):
    message = client.messages.create(**fields(1, **more))
    assert [block.type for block in message.content][:2] == ["thinking", "text"]
    assert kimi.journal("generate")[-1]["is_constrained"]
    has_calls = any(block.type == "tool_use" for block in message.content)
    assert has_calls is (more.get("tool_choice") != {"type": "none"})


def test_pings_break_a_silence_after_the_start(kimi):
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with kimi.client() as http:
        text = http.post("/v1/messages", json=body | {"seed": SLOW_SEED}).text
    names = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]
    assert names[0] == "message_start" and names.count("message_start") == 1
    assert names[:4] == ["message_start", "ping", "ping", "ping"]
    assert ": prefill: " in text and " tokens, ETA " in text


def test_billing_header_does_not_change_the_prompt(client):
    def count(header):
        blocks = [{"type": "text", "text": header}, {"type": "text", "text": "You are a tool."}]
        turns = [{"role": "user", "content": "hi"}]
        assert (
            client.messages.count_tokens(model="tiny", messages=turns, system=header + "You are a tool.").input_tokens
            == client.messages.count_tokens(model="tiny", messages=turns, system=blocks).input_tokens
        )
        return client.messages.count_tokens(model="tiny", messages=turns, system=blocks).input_tokens

    lines = [f"x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n}a;\n" for n in (1, 23, 456)]
    assert {count(line) for line in lines} == {count("")}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "exceed context limit: "),
        ({"messages": [{"role": "user", "content": "x" * 70_000}]}, "prompt is too long: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
         "no vision"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]}]},
         "no vision"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "no vision"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "[messages.0.content.0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "input_schema|id"),
        ({"tools": [TOOL, TOOL]}, "twice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "<|im_end|>", "input_schema": {}}]}, "tools.0.name"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(kimi, more, words):
    body = {"model": "tiny", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **more}
    with kimi.client() as http:
        response = http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert set(error) == {"type", "error"} and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert any(word in error["error"]["message"] for word in words.split("|")), error


def test_errors_of_other_kinds(kimi):
    body = {"model": "tiny", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    with kimi.client(headers={}) as http:
        refused = http.post("/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert http.post("/v1/messages", json=body, headers={"x-api-key": KEY}).status_code == 200
    with kimi.client() as http:
        unknown = http.post("/v1/messages", json=body | {"model": "claude-sonnet"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert http.get("/v1/messages").json()["type"] == "error"
