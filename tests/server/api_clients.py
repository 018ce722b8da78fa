"""The three chat APIs as a client sees them over plain HTTP: one conversation in, one answer out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from proa.chat.output.tools import parse_object

__all__ = ["APIS", "Answer", "sse_events"]

_Json = dict[str, Any]
_ANTHROPIC_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


@dataclass
class Answer:
    """content and reasoning: None for none. calls: (id, name, arguments); Anthropic's ids are of another form."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[list[Any]] = field(default_factory=list)
    finish: str | None = None

    @classmethod
    def expected(cls, expect: _Json, api: str, *, is_whole: bool) -> Answer:
        """What a case expects, as this API says it."""
        calls = [[call["id"], call["name"], call["arguments"]] for call in expect["calls"]]
        if api == "messages":
            calls = [[None, name, _object(arguments) if is_whole else arguments] for _, name, arguments in calls]
        return cls(expect["content"], expect["reasoning"], calls, expect["finish_reason"])

    def add_content(self, text: str) -> None:
        self.content = (self.content or "") + text

    def add_reasoning(self, text: str) -> None:
        self.reasoning = (self.reasoning or "") + text


def sse_events(response: httpx.Response) -> list[_Json]:
    """The JSON of all events; comments and [DONE] left out."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ask_chat(http, tools, messages, *, choice, thinks, seed, stream) -> Answer:
    body = {"messages": messages, "seed": seed, "stream": stream, "thinking": {"type": _switch(thinks)}}
    response = http.post("/v1/chat/completions", json=body | ({"tools": tools, "tool_choice": choice} if tools else {}))
    answer = Answer()
    if not stream:
        (choice,) = response.json()["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        answer.calls = [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in calls]
        answer.content, answer.reasoning = message["content"], message.get("reasoning_content")
        answer.finish = choice["finish_reason"]
        return answer
    for event in sse_events(response):
        (choice,) = event["choices"]
        delta = choice["delta"]
        if delta.get("content"):
            answer.add_content(delta["content"])
        if "reasoning_content" in delta:
            answer.add_reasoning(delta["reasoning_content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(answer.calls)
                answer.calls.append([call["id"], call["function"]["name"], ""])
            assert call["index"] == len(answer.calls) - 1
            answer.calls[-1][2] += call["function"]["arguments"]
        answer.finish = choice["finish_reason"] or answer.finish
    return answer


def ask_responses(http, tools, messages, *, choice, thinks, seed, stream) -> Answer:
    body = {
        "input": [item for message in messages for item in _items(message)],
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "seed": seed,
        "stream": stream,
        "reasoning": {"effort": None if thinks else "none"},
        "tool_choice": choice,
    }
    response = http.post("/v1/responses", json=body)
    answer = Answer()
    if not stream:
        assert response.status_code == 200, response.text
        final = response.json()
    else:
        events = sse_events(response)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        final = events[-1]["response"]
        _same_as_deltas(events, final)
    for item in final["output"]:
        text = "".join(part["text"] for part in item.get("content", ()))
        if item["type"] == "message":
            answer.add_content(text)
        elif item["type"] == "reasoning":
            answer.add_reasoning(text)
        else:
            answer.calls.append([item["call_id"], item["name"], item["arguments"]])
    if final["status"] == "incomplete":
        answer.finish = "length"
    else:
        answer.finish = "tool_calls" if answer.calls else "stop"
    return answer


def _same_as_deltas(events: list[_Json], final: _Json) -> None:
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(final["output"]):
        whole = item["arguments"] if "arguments" in item else "".join(part["text"] for part in item["content"])
        assert deltas.get(index, "") == whole


def _items(message: _Json) -> list[_Json]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    return ([] if calls else [{"role": message["role"], "content": message["content"]}]) + calls


def ask_messages(http, tools, messages, *, choice, thinks, seed, stream) -> Answer:
    body = {
        "max_tokens": 1_000_000,
        "messages": [_turn(message) for message in messages],
        "tools": [_anthropic_tool(tool["function"]) for tool in tools],
        "tool_choice": {"type": choice},
        "thinking": {"type": _switch(thinks)},
        "seed": seed,
        "stream": stream,
    }
    response = http.post("/v1/messages", json=body)
    answer = Answer()
    if not stream:
        assert response.status_code == 200, response.text
        message = response.json()
        for block in message["content"]:
            _add_block(answer, block, block.get("input"))
        answer.finish = _ANTHROPIC_REASONS[message["stop_reason"]]
        return answer
    blocks: list[_Json] = []
    texts: list[str] = []
    for event in sse_events(response):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[event["index"]] += next(
                (event["delta"][key] for key in ("text", "thinking", "partial_json") if key in event["delta"]), ""
            )
        elif event["type"] == "message_delta":
            answer.finish = _ANTHROPIC_REASONS[event["delta"]["stop_reason"]]
    for block, text in zip(blocks, texts, strict=True):
        _add_block(answer, {**block, block["type"]: text}, text)
    return answer


def _add_block(answer: Answer, block: _Json, arguments: Any) -> None:
    if block["type"] == "text":
        answer.add_content(block["text"])
    elif block["type"] == "thinking":
        answer.add_reasoning(block["thinking"])
    else:
        answer.calls.append([None, block["name"], arguments])


def _anthropic_tool(function: _Json) -> _Json:
    schema = {"input_schema": function["parameters"]} if "parameters" in function else {}
    return {"name": function["name"], "description": function.get("description"), **schema}


def _turn(message: _Json) -> _Json:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    if message["role"] == "assistant":
        return {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                for call in message["tool_calls"]
            ],
        }
    return message


def _switch(thinks: bool) -> str:
    return "enabled" if thinks else "disabled"


def _object(arguments: str) -> _Json:
    """Arguments as Anthropic's whole messages have them."""
    value = parse_object(arguments)
    return {"INVALID_JSON": arguments} if value is None else value


APIS = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages}
