"""Any client's conversation -> the one form that Kimi's prompts are written from.

Kimi was trained on call ids `functions.NAME:K`, K counting the calls of the whole conversation from 0; with other ids
in its history it stops calling tools. So every call is renumbered and every tool result bound to its call anew.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa.chat.output.kimi_k2 import call_id
from proa.chat.output.tools import BLANKS
from proa.core.errors import UserError

__all__ = ["NormalHistory", "normalise_history"]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NormalHistory:
    """`messages` for the chat template, and the number that the conversation's next call gets."""

    messages: list[Message]
    next_index: int


def normalise_history(
    messages: Sequence[Mapping[str, Any]], new_id: Callable[[str, int], str] = call_id
) -> NormalHistory:
    """OpenAI messages in Kimi's form. The input stays as it is; linear in its size. `new_id`: of (name, K), see below.

    - Calls: `{id: functions.NAME:K, type: function, function: {name, arguments}}`, arguments as text.
    - Results get the id of their call: by their own id, else by name, else in order; adjacent results are sorted.
    - Content: text, or parts when one is not text. Assistant messages always have `reasoning_content`.
    - Keys that a prompt cannot hold are dropped.

    Raises:
        UserError: a tool call that is no function call.
    """
    binder = _Binder(new_id)
    normal: list[Message] = []
    results: list[Message] = []
    for position, message in enumerate(messages):
        if message.get("role") == "tool":
            results.append(_plain(message))
            continue
        normal += binder.bind(results)
        results = []
        if message.get("role") == "assistant":
            normal.append(_assistant(message, binder, f"messages[{position}]"))
        else:
            normal.append(_plain(message))
    normal += binder.bind(results)
    return NormalHistory(normal, binder.next_index)


@dataclass(slots=True)
class _Call:
    """A call of the history."""

    number: int
    new_id: str
    has_result: bool = False


@dataclass(slots=True)
class _CallsOfId:
    """The calls that share an old id: those of one assistant message together, the latest message last."""

    last: _Call
    turns: list[deque[_Call]] = field(default_factory=list)

    def next_without_result(self) -> _Call | None:
        while self.turns:
            if (call := _first_open(self.turns[-1])) is not None:
                return call
            self.turns.pop()
        return None


def _first_open(calls: deque[_Call]) -> _Call | None:
    """The first call without a result; those before it are taken out."""
    while calls and calls[0].has_result:
        calls.popleft()
    return calls[0] if calls else None


class _Binder:
    """Numbers calls, and finds the call of each result."""

    def __init__(self, new_id: Callable[[str, int], str]) -> None:
        self.next_index = 0
        self._new_id = new_id
        self._by_id: dict[Any, _CallsOfId] = {}
        # Of the latest assistant message with calls: all of them, and by name.
        self._latest: deque[_Call] = deque()
        self._latest_named: dict[str, deque[_Call]] = {}

    def add(self, calls: Sequence[tuple[Any, str]]) -> list[str]:
        """The calls of an assistant message as (old id or None, name); their new ids."""
        self._latest = deque()
        self._latest_named = defaultdict(deque)
        turns: dict[str, deque[_Call]] = defaultdict(deque)
        for old_id, name in calls:
            call = _Call(self.next_index, self._new_id(name, self.next_index))
            self.next_index += 1
            self._latest.append(call)
            self._latest_named[name].append(call)
            if isinstance(old_id, str):
                turns[old_id].append(call)
        for old_id, turn in turns.items():
            self._by_id.setdefault(old_id, _CallsOfId(turn[-1])).turns.append(turn)
            self._by_id[old_id].last = turn[-1]
        return [call.new_id for call in self._latest]

    def bind(self, results: list[Message]) -> list[Message]:
        """A run of adjacent results with the ids of their calls, in the order of the calls, unbound ones last."""
        numbers: dict[int, int] = {}
        for position, result in enumerate(results):
            old_id = result.get("tool_call_id")
            if isinstance(old_id, str) and (known := self._by_id.get(old_id)) is not None:
                numbers[position] = self._take(result, known.next_without_result() or known.last)
        for position, result in enumerate(results):
            if position not in numbers and (call := self._by_name_or_order(result.get("name"))) is not None:
                numbers[position] = self._take(result, call)
        order = sorted(range(len(results)), key=lambda position: numbers.get(position, self.next_index))
        return [results[position] for position in order]

    def _take(self, result: Message, call: _Call) -> int:
        call.has_result = True
        result["tool_call_id"] = call.new_id
        return call.number

    def _by_name_or_order(self, name: Any) -> _Call | None:
        named = self._latest_named.get(name) if isinstance(name, str) else None
        return (_first_open(named) if named else None) or _first_open(self._latest)


def _assistant(message: Mapping[str, Any], binder: _Binder, where: str) -> Message:
    content = message.get("content")
    thinking = ""
    if isinstance(content, list):
        thinking = "".join(str(part.get("thinking") or "") for part in content if _is_part(part, "thinking"))
        content = [part for part in content if not _is_part(part, "thinking")]
    normal = _named(message, {"role": "assistant", "content": _content(content)})
    candidates = (message.get("reasoning_content"), message.get("reasoning"), thinking)
    normal["reasoning_content"] = next((text for text in candidates if isinstance(text, str) and text), "")
    if calls := message.get("tool_calls"):
        functions = [_function(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
        new_ids = binder.add(
            [(call.get("id"), function["name"]) for call, function in zip(calls, functions, strict=True)]
        )
        normal["tool_calls"] = [
            {"id": new_id, "type": "function", "function": function}
            for new_id, function in zip(new_ids, functions, strict=True)
        ]
    return normal


def _plain(message: Mapping[str, Any]) -> Message:
    normal = _named(message, {"role": message.get("role"), "content": _content(message.get("content"))})
    if message.get("role") == "tool" and message.get("tool_call_id"):
        normal["tool_call_id"] = message["tool_call_id"]
    return normal


def _named(message: Mapping[str, Any], normal: Message) -> Message:
    if message.get("name"):
        normal["name"] = message["name"]
    return normal


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list) and all(_is_part(part, "text") for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return content


def _is_part(part: Any, kind: str) -> bool:
    return isinstance(part, Mapping) and part.get("type") == kind


def _function(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(where, "a call with function.name and function.arguments", type(function).__name__)
    return {"name": function["name"], "arguments": _arguments(function.get("arguments"))}


def _arguments(arguments: Any) -> str:
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        return arguments if arguments.strip(BLANKS) else "{}"
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
