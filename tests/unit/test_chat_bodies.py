"""Bodies of the chat APIs with anything in any place: translated, or refused with a typed error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from proa.core.errors import UserError
from proa.server.anthropic_request import MessagesRequest
from proa.server.errors import invalid_request
from proa.server.protocol import ChatCompletionRequest
from proa.server.responses_request import ResponsesRequest

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[type, dict[str, Any]] = {
    ChatCompletionRequest: {
        "messages": [
            {"role": "developer", "content": "s", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}], "tool_calls": [CALL]},
            {"role": "tool", "content": None, "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "thinking": {"type": "enabled"},
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "chat_template_kwargs": {"thinking": True},
    },
    ResponsesRequest: {
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"role": "assistant", "content": "a"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
        ],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "include": ["reasoning.encrypted_content"],
    },
    MessagesRequest: {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
                    {"type": "search_result", "content": [{"type": "text", "text": "r"}]},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        "stop_sequences": ["x"],
    },
}


def places(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path] if path else []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        found += places(entry, (*path, key))
    return found


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
    | st.sampled_from(["text", "function", "input_text", "tool_result", "image_url", "message", "\0", "proa1.x"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["type", "text", "content", "role", "name", "function"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def translated(model: type, body: dict[str, Any]) -> Any:
    try:
        request = model.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise invalid_request(error) from None
    return request.chat()


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_the_bodies_are_good(model):
    chat = translated(model, BODIES[model])
    chat.check_tool_choice()
    assert chat.turn.messages and chat.turn.tools and chat.response_format["type"] == "json_schema"
    assert chat.tool_choice.mode == "required"


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_anything_anywhere(model):
    every = places(BODIES[model])

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.lists(st.tuples(st.sampled_from(every), ODD), min_size=1, max_size=3))
    def check(changes):
        body = BODIES[model]
        for path, odd in changes:
            try:
                body = replaced(body, path, odd)
            except (KeyError, IndexError, TypeError, AttributeError):  # the place went with an earlier change
                continue
        try:
            chat = translated(model, body)
            chat.check_tool_choice()
        except UserError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.http_status == 400 and len(str(refusal)) < 2000
            return
        for message in chat.turn.messages:
            assert isinstance(message["content"], str)
            for call in message.get("tool_calls", ()):
                assert isinstance(call["function"]["name"], str)
        assert all(isinstance(tool["type"], str) for tool in chat.turn.tools)

    check()
