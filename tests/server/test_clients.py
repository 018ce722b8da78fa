"""Clients as they are: what they send and how they read a stream, for two turns with tools and a model switch.

Each file in clients/ is one client: what it sends in every request, and turns with what the model answers, what the
client is to read, and what the prompt holds. $ID0 is the id that the client read of the first call of the turn before,
$SEALED the encrypted reasoning, $SIGNATURE that of the thinking. The test adds the seed that picks the answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from api_clients import sse_events
from fake_engine import ANSWER_SEED
from kimi_model import last_prompt, scripted_server
from server_process import KEY

from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

CLIENTS = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "clients").glob("*.json"))
}
ANSWERS = [turn["answer"] for client in CLIENTS.values() for turn in client["turns"]]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("clients"), ANSWERS) as process:
        yield process


@pytest.fixture(scope="module")
def tokenizer(kimi):
    return TiktokenTokenizer.load(kimi.journal_file.parent / "model")


class Read:
    """What a client read of an answer. `calls`: [id, name, arguments]."""

    def __init__(self):
        self.content, self.reasoning, self.calls = None, None, []
        self.usage, self.values = None, {}


def read_chat(events, place):
    """`place`: which call a delta belongs to, None for a new one."""
    read = Read()
    for event in events:
        read.usage = event.get("usage") or read.usage
        assert "error" not in event
        for choice in event["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                read.content = (read.content or "") + delta["content"]
            if delta.get("reasoning_content") is not None:
                read.reasoning = (read.reasoning or "") + delta["reasoning_content"]
            for call in delta.get("tool_calls") or ():
                at = place(read.calls, call)
                if at is None:
                    read.calls.append([call["id"], call["function"]["name"], ""])
                    at = -1
                read.calls[at][2] += call["function"].get("arguments") or ""
    return read


def by_index(calls, call):
    assert call["index"] <= len(calls)
    return call["index"] if call["index"] < len(calls) else None


def by_id(calls, call):
    """Copilot: the index is ignored, deltas without an id go to the last call."""
    if not call.get("id"):
        return -1
    return next((at for at, (call_id, *_) in enumerate(calls) if call_id == call["id"]), None)


def append(calls, call):
    """kimi-cli: what has an id begins a call."""
    return None if call.get("id") else -1


def read_codex(events):
    """Codex builds its history from output_item.done and needs response.completed with the usage."""
    read = Read()
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    read.usage = events[-1]["response"]["usage"]
    for event in events:
        if event["type"] != "response.output_item.done":
            continue
        item = event["item"]
        match item["type"]:
            case "message":
                read.content = (read.content or "") + "".join(part["text"] for part in item["content"])
            case "reasoning":
                read.reasoning = "".join(part["text"] for part in item["content"])
                read.values["$SEALED"] = item["encrypted_content"]
            case "function_call":
                name = "/".join(filter(None, (item.get("namespace"), item["name"])))
                read.calls.append([item["call_id"], name, item["arguments"]])
            case "custom_tool_call":
                read.calls.append([item["call_id"], item["name"], item["input"]])
    return read


def read_anthropic(events):
    read = Read()
    blocks: list[dict] = []
    for event in events:
        match event["type"]:
            case "message_start":
                read.usage = dict(event["message"]["usage"])
            case "content_block_start":
                blocks.append({"text": "", **event["content_block"]})
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    read.values["$SIGNATURE"] = delta["signature"]
                else:
                    blocks[event["index"]]["text"] += delta.get(
                        "text", delta.get("thinking", delta.get("partial_json"))
                    )
            case "message_delta":
                read.usage |= event["usage"]
                assert event["delta"]["stop_reason"] == ("tool_use" if "tool_use" in str(blocks) else "end_turn")
    for block in blocks:
        if block["type"] == "tool_use":
            read.calls.append([block["id"], block["name"], block["text"]])
        elif block["type"] == "thinking":
            read.reasoning = block["text"]
        else:
            read.content = (read.content or "") + block["text"]
    return read


READERS = {
    "by_index": lambda events: read_chat(events, by_index),
    "by_id": lambda events: read_chat(events, by_id),
    "append": lambda events: read_chat(events, append),
    "codex": read_codex,
    "anthropic": read_anthropic,
}


def filled(value, values):
    if isinstance(value, dict):
        return {key: filled(entry, values) for key, entry in value.items()}
    if isinstance(value, list):
        return [filled(entry, values) for entry in value]
    return values.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("name", CLIENTS)
def test_two_turns_with_tools_and_a_model_switch(kimi, tokenizer, name):
    client, values = CLIENTS[name], {"$KEY": KEY, "Bearer $KEY": f"Bearer {KEY}"}
    read = READERS[client["reader"]]
    with kimi.client(headers=filled(client["headers"], values)) as http:
        for turn in client["turns"]:
            sent = {key: turn[key] for key in ("messages", "input", "system") if key in turn}
            seed = ANSWER_SEED + ANSWERS.index(turn["answer"])
            response = http.post(client["path"], json=filled({**client["common"], **sent, "seed": seed}, values))
            got = read(sse_events(response))
            expect = turn["expect"]
            assert (got.content, got.reasoning) == (expect["content"], expect["reasoning"])
            assert [call[1:] for call in got.calls] == expect["calls"]
            ids = [call[0] for call in got.calls]
            assert len(set(ids)) == len(ids) and all(0 < len(call_id) <= 64 for call_id in ids)
            assert ids == turn.get("ids", ids)
            counts = [
                got.usage.get(key) for key in ("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens")
            ]
            assert sum(isinstance(count, int) for count in counts) == 2
            values |= {f"$ID{index}": call_id for index, call_id in enumerate(ids)} | got.values
            prompt = tokenizer.decode(last_prompt(kimi))
            assert all(text in prompt for text in turn.get("prompt_has", ())), prompt
            assert not any(text in prompt for text in turn.get("prompt_lacks", ())), prompt
            assert prompt.endswith("<|im_assistant|>assistant<|im_middle|><think>")
