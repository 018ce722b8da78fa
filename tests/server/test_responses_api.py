"""OpenAI's Responses API in front of a Kimi model, through the openai SDK."""

from __future__ import annotations

import json

import openai
import pytest
from fake_engine import ANSWER_SEED, FAILING_SEED, SLOW_SEED
from kimi_model import AB, CB, CE, SB, SE, TE, scripted_server
from server_process import KEY

from proa.server.responses_items import messages_of, sealed, unsealed

OSLO = '{"place":"Oslo é 🙂"}'
PATCH = "*** Begin Patch\n*** End Patch"
TOOLS: list[dict] = [
    {
        "type": "function", "name": "weather", "strict": False,
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
    {
        "type": "custom", "name": "apply_patch", "description": "Edit files",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
    },
    {"type": "namespace", "name": "mcp__docs__", "description": "", "tools": [{"type": "function", "name": "find"}]},
    {"type": "web_search"},
]  # fmt: skip


def call(name, arguments):
    return f"{CB}functions.{name}:0{AB}{arguments}{CE}"


PATCH_CALL = call("apply_patch", json.dumps({"input": PATCH}))
ANSWERS = [
    f"why{TE}Hello.",
    f"why{TE}On it.{SB}{call('weather', OSLO)}{PATCH_CALL}{call('mcp__docs__find', '{}')}{SE} and then",
    f"why{TE}{SB}{call('apply_patch', 'as it is')}{SE}",
]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("kimi"), ANSWERS, keepalive_interval=0.25) as process:
        yield process


@pytest.fixture
def client(kimi):
    with openai.OpenAI(base_url=kimi.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def fields(number, **more):
    return {"model": "tiny", "input": "Weather?", "tools": TOOLS, "extra_body": {"seed": ANSWER_SEED + number}, **more}


def items_of(response):
    items = []
    for item in response.output:
        match item.type:
            case "message" | "reasoning":
                items.append((item.type, "".join(part.text for part in item.content)))
            case "function_call":
                items.append((item.name, item.namespace, item.arguments))
            case "custom_tool_call":
                items.append((item.name, None, item.input))
    return items


EXPECTED = [
    [("reasoning", "why"), ("message", "Hello.")],
    [
        ("reasoning", "why"), ("message", "On it."), ("weather", None, OSLO), ("apply_patch", None, PATCH),
        ("find", "mcp__docs__", "{}"), ("message", " and then"),
    ],
    [("reasoning", "why"), ("apply_patch", None, "as it is")],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_whole_and_streamed(client, number):
    whole = client.responses.create(**fields(number))
    assert items_of(whole) == EXPECTED[number]
    assert whole.status == "completed" and whole.store is False and whole.id.startswith("resp_")
    with client.responses.stream(**fields(number)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert items_of(final) == EXPECTED[number] and final.usage == whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens in (3, 4)
    ids = [item.call_id for item in whole.output if "call" in item.type]
    assert len(set(ids)) == len(ids)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"


def test_events_on_the_wire(kimi):
    body = {"model": "tiny", "input": "Weather?", "tools": TOOLS, "seed": ANSWER_SEED + 1, "stream": True}
    with kimi.client() as http:
        events = events_of(http.post("/v1/responses", json=body).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    index, names = -1, []
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            index, names = index + 1, []
        assert event["output_index"] == index
        names.append(event["type"].removeprefix("response."))
        if event["type"] == "response.output_item.done":
            kind = event["item"]["type"]
            middle = {
                "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
                "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"],
                "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
                "custom_tool_call": ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
            }[kind]
            assert list(dict.fromkeys(names)) == ["output_item.added", *middle, "output_item.done"]
            assert event["item"]["status"] == "completed"
    assert index == 5 and [item["id"] for item in events[-1]["response"]["output"]] == [
        event["item"]["id"] for event in events if event["type"] == "response.output_item.done"
    ]


def events_of(text):
    events = []
    for frame in text.split("\n\n"):
        lines = [line for line in frame.split("\n") if line and not line.startswith(":")]
        if lines:
            event = json.loads(lines[1].removeprefix("data: "))
            assert lines[0] == f"event: {event['type']}"
            events.append(event)
    return events


def test_length_makes_it_incomplete(client):
    for stream in (False, True):
        answer = client.responses.create(**fields(0, max_output_tokens=6, stream=stream))
        final = list(answer)[-1].response if stream else answer
        assert final.status == "incomplete" and final.incomplete_details.reason == "max_output_tokens"
        assert items_of(final) == [("reasoning", "why"), ("message", "He")]
        assert final.output[-1].status == "incomplete"


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "name": "find", "namespace": "mcp__docs__"}},
        {"tool_choice": {"type": "custom", "name": "apply_patch"}},
        {
            "tool_choice": {
                "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]
            }
        },
        {"tools": [], "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
    ],
)  # fmt: skip
def test_what_constrains_the_answer(kimi, client, more):
    assert client.responses.create(**fields(0, **more)).status == "completed"
    assert kimi.journal("generate")[-1]["is_constrained"]


def test_silence_and_failure(kimi):
    body = {"model": "tiny", "input": "hi", "stream": True, "max_output_tokens": 9}
    with kimi.client() as http:
        tools = [{"type": "function", "name": "weather", "description": "long " * 1000}]
        text = http.post("/v1/responses", json=body | {"seed": SLOW_SEED, "tools": tools}).text
        silences = [event for event in events_of(text) if event["type"] == "response.in_progress"][1:]
        assert silences and all(len(json.dumps(event)) < 1500 for event in silences)
        kinds = [event["type"] for event in events_of(text)]
        assert [event["sequence_number"] for event in events_of(text)] == list(range(len(kinds)))
        assert kinds[0] == "response.created" and kinds.count("response.created") == 1
        assert kinds.count("response.in_progress") >= 3 and ": prefill: " in text
        failed = events_of(http.post("/v1/responses", json=body | {"seed": FAILING_SEED}).text)
    assert failed[0]["type"] == "response.created" and failed[-1]["type"] == "response.failed"
    assert failed[-1]["response"]["status"] == "failed" and "injected" in failed[-1]["response"]["error"]["message"]


def test_reasoning_comes_back_sealed_to_clients_that_drop_its_text(client):
    response = client.responses.create(**fields(0, include=["reasoning.encrypted_content"]))
    item = response.output[0]
    assert unsealed(item.encrypted_content) == "why"
    history = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": OSLO},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    messages = messages_of(history)
    assert messages[1]["reasoning_content"] == "why" and messages[1]["tool_calls"][0]["id"] == "call_1"
    client.responses.create(**fields(0, input=history))


def test_seals_of_others_are_ignored():
    for text in ("", "é 🙂", "x" * 10_000):
        assert unsealed(sealed(text)) == text
    for content in (None, 5, "gAAAAB", "proa1.*", "proa1.gA==", "proa1./w=="):
        assert unsealed(content) == ""


def test_input_items():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "do "}, {"type": "input_text", "text": "it"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "On it."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": OSLO},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'a "b"\n'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "more"}]},
        {"type": "function_call", "call_id": "c3", "namespace": "mcp__docs", "name": "find", "arguments": ""},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
    ]
    messages = messages_of(items)
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool",
    ]  # fmt: skip
    answer = messages[2]
    assert (answer["content"], answer["reasoning_content"]) == ("On it.", "short")
    functions = [entry["function"] for entry in answer["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": OSLO},
        {"name": "apply_patch", "arguments": '{"input":"a \\"b\\"\\n"}'},
    ]
    assert messages[3]["content"] == "rain" and messages[5]["reasoning_content"] == "more"
    assert messages[5]["tool_calls"][0]["function"]["name"] == "mcp__docs__find"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]},
         "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}]},
         "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a\0"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "user", "content": "a\0"}]}, "input.0.content"),
        ({"input": "x" * 70_000}, "input"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"model": "gpt-5"}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(kimi, more, param):
    with kimi.client() as http:
        response = http.post("/v1/responses", json={"model": "tiny", "input": "hi", "tools": TOOLS, **more})
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
