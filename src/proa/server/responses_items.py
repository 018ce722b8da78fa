"""Input items of the Responses API as messages. Items of one answer in a row become one assistant message."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any

from proa.core.errors import UserError
from proa.server.chat_request import system_text
from proa.server.content import text_of
from proa.server.responses_tools import flat_name, free_text_arguments

__all__ = ["messages_of", "sealed", "unsealed"]

_ROLES = ("user", "assistant", "system", "developer")
# Reasoning that this server gave out for the client to hand back; other servers' is encrypted, and ignored.
_SEAL = "proa1."

_Message = dict[str, Any]
_Item = Mapping[str, Any]


def sealed(reasoning: str) -> str:
    """`reasoning` as `encrypted_content`: not secret, but kept by clients that drop the text itself."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def unsealed(content: Any) -> str:
    """The reasoning in an `encrypted_content` of this server's; "" in any other."""
    if not isinstance(content, str) or not content.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(content[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def messages_of(items: Iterable[_Item]) -> list[_Message]:
    """The conversation. Items of kinds that mean nothing to a model here are left out.

    Raises:
        UserError: an item without what its kind needs, or one that refers to what this server never kept.
    """
    history = _History()
    for index, item in enumerate(items):
        history.add(item, f"input.{index}")
    return history.messages


class _History:
    def __init__(self) -> None:
        self.messages: list[_Message] = []
        # The assistant message that further items of the same answer go to.
        self._answer: _Message | None = None

    def add(self, item: _Item, where: str) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._call(item, _text(item, "arguments", where), where)
            case "custom_tool_call":
                self._call(item, free_text_arguments(_text(item, "input", where)), where)
            case "local_shell_call":
                arguments = json.dumps(item.get("action") or {}, ensure_ascii=False, separators=(",", ":"))
                self._call({"name": "local_shell", **item}, arguments, where)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._result(item, where)
            case "item_reference":
                raise UserError(where, "the item itself: this server keeps no responses", "a reference to one")
            case None:
                raise UserError(f"{where}.type", "the type of an item", "none")
            case _:
                pass

    def _message(self, item: _Item, where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in _ROLES:
            raise UserError(f"{where}.role", ", ".join(_ROLES), repr(role)[:100])
        if content is not None and not isinstance(content, str | list):
            raise UserError(f"{where}.content", "text or parts", type(content).__name__)
        text = _parts_text(content, f"{where}.content")
        if role == "assistant":
            answer = self._open(allow_calls=False)
            answer["content"] += text
            return
        self._answer = None
        if role == "user":
            self.messages.append({"role": "user", "content": text})
        elif text := system_text(text):
            self.messages.append({"role": "system", "content": text})

    def _reasoning(self, item: _Item, where: str) -> None:
        """Reasoning comes first in an answer."""
        text = (
            _parts_text(item.get("content"), f"{where}.content")
            or unsealed(item.get("encrypted_content"))
            or _parts_text(item.get("summary"), f"{where}.summary")
        )
        if self._answer is not None and (self._answer["content"] or self._answer.get("tool_calls")):
            self._answer = None
        answer = self._open(allow_calls=False)
        answer["reasoning"] = answer["reasoning_content"] = answer.get("reasoning", "") + text

    def _call(self, item: _Item, arguments: str, where: str) -> None:
        name = flat_name(_text(item, "name", where), item.get("namespace"))
        answer = self._open(allow_calls=True)
        call = {"id": _call_id(item, where), "type": "function", "function": {"name": name, "arguments": arguments}}
        answer.setdefault("tool_calls", []).append(call)

    def _result(self, item: _Item, where: str) -> None:
        self._answer = None
        output = item.get("output")
        if output is not None and not isinstance(output, str | list):
            output = json.dumps(output, ensure_ascii=False, separators=(",", ":"))
        text = _parts_text(output, f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": _call_id(item, where), "content": text})

    def _open(self, *, allow_calls: bool) -> _Message:
        if self._answer is None or (not allow_calls and self._answer.get("tool_calls")):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer


def _call_id(item: _Item, where: str) -> str:
    """Codex's local shell knows its calls by `id`, everything else by `call_id`."""
    key = "call_id" if item.get("call_id") is not None else "id"
    return _text(item, key, where)


def _text(item: _Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or "\0" in value:
        raise UserError(f"{where}.{key}", "text without NUL characters", type(value).__name__)
    return value


def _parts_text(content: Any, where: str) -> str:
    if isinstance(content, str) and "\0" in content:
        raise UserError(where, "text without NUL characters", "one with them")
    if isinstance(content, list) and not all(isinstance(part, Mapping) for part in content):
        raise UserError(where, "parts as objects", "something else")
    return text_of(content if isinstance(content, str | list) else None, where)
