"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's request, translated to the form of every API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from proa.chat.dialect import ChatTurn
from proa.core.errors import UserError
from proa.server.chat_request import ChatRequest, ToolChoice, check_tool_names, system_text
from proa.server.content import part_text, text_of
from proa.server.field_types import Body, Flag, Name, Text, at_most
from proa.server.generation_request import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatBody, check_stops
from proa.server.messages import MAX_PARTS, FunctionName, Thinking

__all__ = ["INVALID_JSON", "MessagesRequest"]

# The key under which Anthropic's clients keep arguments that are no JSON object.
INVALID_JSON = "INVALID_JSON"

_Message = dict[str, Any]
_Blocks = Annotated[Text | list[dict[str, Any]], at_most(MAX_PARTS)]

# Tools that the client runs and whose schema the API knows by their type.
_CLIENT_TOOLS: dict[str, dict[str, Any]] = {
    "bash_": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}},
    },
    "text_editor_": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": {"type": "string"},
            "view_range": {"type": "array", "items": {"type": "integer"}},
            "file_text": {"type": "string"},
            "old_str": {"type": "string"},
            "new_str": {"type": "string"},
            "insert_line": {"type": "integer"},
            "insert_text": {"type": "string"},
        },
        "required": ["command", "path"],
    },
}


class Turn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: _Blocks


class ToolBody(Body):
    """An entry of `tools`: the client's own, or one of Anthropic's, known by its type."""

    type: Name | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: Flag | None = None

    def as_openai(self) -> dict[str, Any] | None:
        """The function; None for a tool that Anthropic's servers would run."""
        schema = self.input_schema
        if self.type not in (None, "custom") and schema is None:
            schema = next((known for prefix, known in _CLIENT_TOOLS.items() if str(self.type).startswith(prefix)), None)
            if schema is None:
                return None
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = schema or {"type": "object", "properties": {}}
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoiceBody(Body):
    """Whether and what the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: Flag | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and not self.name:
            raise ValueError("a tool with its name")
        return self


class MessagesRequest(ChatBody):
    """POST /v1/messages; without max_tokens the rest of the context."""

    PROMPT_FIELD: ClassVar[str] = "messages"

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
    system: _Blocks | None = None
    stop_sequences: Annotated[list[str] | None, at_most(MAX_STOPS)] = None
    tools: Annotated[list[ToolBody] | None, at_most(MAX_TOOLS)] = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None

    _check_stop_sequences = field_validator("stop_sequences")(check_stops)

    @field_validator("model")
    @classmethod
    def _plain_model(cls, name: str | None) -> str | None:
        """Claude Code asks for a long context by a suffix of the name."""
        return name.removesuffix("[1m]") if name is not None else None

    @model_validator(mode="after")
    def _check_messages(self) -> Self:
        if (self.n or 1) > 1:
            raise UserError("n", "1", self.n)
        if self.mcp_servers:
            raise UserError("mcp_servers", "none", len(self.mcp_servers), "call them from the client")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (*super().stops, *(self.stop_sequences or ()))

    def chat(self) -> ChatRequest:
        """See ChatBody."""
        return ChatRequest(
            turn=self.turn(),
            tool_choice=self._choice,
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            response_format=self._response_format,
            max_new_tokens=self.max_tokens,
        )

    def turn(self) -> ChatTurn:
        """The conversation in the form that every API is translated to."""
        tools = [tool for body in self.tools or () if (tool := body.as_openai()) is not None]
        check_tool_names(tool["function"]["name"] for tool in tools)
        messages: list[_Message] = []
        if system := _system(self.system, "system"):
            messages.append({"role": "system", "content": system})
        for index, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages.{index}.content")
        # An assistant's last message is the beginning of the answer; Anthropic lets that one be empty.
        if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()
        last = messages[-1]
        continues = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
        return ChatTurn(
            messages=messages,
            tools=tools,
            no_calls=self._choice.mode == "none",
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            reasoning_effort=_effort((self.output_config or {}).get("effort")),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    @property
    def _choice(self) -> ToolChoice:
        choice = self.tool_choice
        if choice is None or choice.type == "auto":
            return ToolChoice()
        return ToolChoice("none") if choice.type == "none" else ToolChoice("required", choice.name)

    @property
    def _response_format(self) -> dict[str, Any] | None:
        given = self.output_format or (self.output_config or {}).get("format")
        if not isinstance(given, dict):
            return None
        return {"type": given.get("type"), "json_schema": {"name": "output", "schema": given.get("schema")}}


def _effort(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= 100 else None


def _system(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return system_text(content)
    return "".join(system_text(part_text(block, f"{where}.{index}")) for index, block in enumerate(content or ()))


def _messages(turn: Turn, where: str) -> list[_Message]:
    if turn.role == "system":
        return [{"role": "system", "content": _system(turn.content, where)}]
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    return [_assistant(turn.content, where)] if turn.role == "assistant" else _user(turn.content, where)


def _user(blocks: list[dict[str, Any]], where: str) -> list[_Message]:
    """Tool results become messages of their own, in their place among the text."""
    messages: list[_Message] = []
    for index, block in enumerate(blocks):
        here = f"{where}.{index}"
        if block.get("type") == "tool_result":
            messages.append(_tool_result(block, here))
            continue
        text = part_text(_plain_block(block), here)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: Mapping[str, Any], where: str) -> _Message:
    content = block.get("content")
    if isinstance(content, list):
        content = [_plain_block(part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise UserError(f"{where}.content", "text or blocks", type(content).__name__)
    text = text_of(content, f"{where}.content")
    # The model's prompt has no flag for it.
    if block.get("is_error") is True and "error" not in text[:64].lower():
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": text}


def _assistant(blocks: list[dict[str, Any]], where: str) -> _Message:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{where}.{index}"
        match block.get("type"):
            case "thinking":
                thoughts.append(_text(block, "thinking", here))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": _text(block, "name", here), "arguments": _arguments(block.get("input"))}
                calls.append({"id": _text(block, "id", here), "type": "function", "function": function})
            case _:
                texts.append(part_text(_plain_block(block), here))
    message: _Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {INVALID_JSON} and isinstance(value[INVALID_JSON], str):
        return str(value[INVALID_JSON])
    return json.dumps(value or {}, ensure_ascii=False, separators=(",", ":"))


def _plain_block(block: Any) -> Mapping[str, Any]:
    """A block that holds text in a form of its own, as a text block."""
    if not isinstance(block, Mapping):
        return {}
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    if block.get("type") == "search_result" and isinstance(block.get("content"), list):
        return {"type": "text", "text": text_of(map(_plain_block, block["content"]), "search_result.content")}
    return block


def _text(block: Mapping[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str) or "\0" in value:
        raise UserError(f"{where}.{key}", "text without NUL characters", type(value).__name__)
    return value
