"""The grammar of a run of tool calls, in the family's own frame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proa.chat.grammar.frames import CallFrame, Marker, Slot

__all__ = ["MAX_CALLS", "CallGrammar", "ToolRule"]

# Calls of one answer. The grammar writes their numbers out.
MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A function and the rule for its arguments. has_schema: the rule holds a schema of the client's."""

    name: str
    arguments: str
    has_schema: bool


class CallGrammar:
    """Calls of `tools` and what begins and ends them.

    starts, pauses: as in Constraint; empty when the checkpoint has no token for the markers.
    """

    def __init__(
        self,
        frame: CallFrame,
        marker_ids: Mapping[str, int],
        tools: Sequence[ToolRule],
        *,
        first_number: int,
        only_one: bool,
    ) -> None:
        self._frame = frame
        self._marker_ids = marker_ids
        self._tools = tools
        self._first_number = first_number
        self._only_one = only_one

    @property
    def where(self) -> str:
        """The field that the schemas came from."""
        return "tools"

    @property
    def has_schemas(self) -> bool:
        """Whether there is anything of the client's in it but names."""
        return any(tool.has_schema for tool in self._tools)

    @property
    def starts(self) -> dict[int, tuple[int, ...]]:
        """A call's own marker opens a section too, as the parser reads it."""
        section, call = self._frame.section, self._marker_ids.get(self._first_marker)
        if section is None:
            return {} if call is None else {call: (call,)}
        begin = self._marker_ids.get(section[0])
        if begin is None or call is None:
            return {}
        return {begin: (begin,), call: (begin, call)}

    @property
    def pauses(self) -> tuple[int, ...]:
        """The marker after which there may be text again."""
        last = self._frame.section[1] if self._frame.section is not None else self._last_marker
        token_id = self._marker_ids.get(last)
        return () if token_id is None else (token_id,)

    def text(self, start: str, *, first_number: int | None = None) -> str:
        """The whole grammar; `start`: the body of its first rule, in which `calls` are these calls.

        `first_number`: another one for the first call. After the end of a section another one may begin.
        """
        rules: dict[str, str] = {}
        calls = [self._call(tool, rules.setdefault(tool.arguments, f"arguments_{len(rules)}")) for tool in self._tools]
        alternatives = "\n | ".join(calls)
        if Slot.NUMBER in self._frame.call:
            first = self._first_number if first_number is None else first_number
            run = self._numbered_run(alternatives, first)
        else:
            run = self._plain_run(alternatives)
        lines = [f"start: {start}", *run, *(f"{name}: {rule}" for rule, name in rules.items())]
        return "\n".join(lines) + "\n"

    def _numbered_run(self, call: str, first: int) -> list[str]:
        """Rules whose parameter counts the calls before."""
        more = [f"call::_ {self._end}"]
        if not self._only_one:
            limit = f"%if lt(_, {MAX_CALLS - 1})"
            more.append(f"call::_ {self._separator} more::incr(_) {limit}")
            if self._end:
                more.append(f"call::_ {self._end} {self._begin} more::incr(_) {limit}")
        numbers = "\n | ".join(f'"{first + index}" %if eq(_, {index})' for index in range(MAX_CALLS))
        return [
            f"calls: {self._begin} more::0",
            "more::_: " + "\n | ".join(more),
            f"call::_: {call}",
            f"number::_: {numbers}",
        ]

    def _plain_run(self, call: str) -> list[str]:
        if self._only_one:
            return [f"calls: {self._begin} call {self._end}", f"call: {call}"]
        section = f"{self._begin} call ({self._separator} call)* {self._end}"
        return [f"calls: ({section})+" if self._end else f"calls: {section}", f"call: {call}"]

    @property
    def _first_marker(self) -> str:
        return next(piece.name for piece in self._frame.call if isinstance(piece, Marker))

    @property
    def _last_marker(self) -> str:
        return next(piece.name for piece in reversed(self._frame.call) if isinstance(piece, Marker))

    @property
    def _begin(self) -> str:
        return self._marker(self._frame.section[0]) if self._frame.section is not None else ""

    @property
    def _end(self) -> str:
        return self._marker(self._frame.section[1]) if self._frame.section is not None else ""

    @property
    def _separator(self) -> str:
        return f"{_literal(self._frame.separator)}?" if self._frame.separator else ""

    def _marker(self, name: str) -> str:
        token_id = self._marker_ids.get(name)
        return _literal(name) if token_id is None else f"<[{token_id}]>"

    def _call(self, tool: ToolRule, arguments: str) -> str:
        parts: list[str] = []
        text = ""
        for piece in self._frame.call:
            if isinstance(piece, str):
                text += piece
            elif piece is Slot.NAME:
                text += tool.name
            elif piece is Slot.JSON_NAME:
                text += json.dumps(tool.name, ensure_ascii=False)[1:-1]
            else:
                if text:
                    parts.append(_literal(text))
                text = ""
                if isinstance(piece, Marker):
                    parts.append(self._marker(piece.name))
                else:
                    parts.append("number::_" if piece is Slot.NUMBER else arguments)
        if text:
            parts.append(_literal(text))
        return " ".join(parts)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
