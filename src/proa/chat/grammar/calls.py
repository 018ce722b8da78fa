"""The grammar of a run of tool calls, in the family's own frame."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proa.chat.grammar.frames import CallFrame, Slot
from proa.chat.grammar.rules import Marker, Piece, RuleBook, Spelling, literal

__all__ = ["MAX_CALLS", "CallGrammar", "ToolRule"]

# Calls of one answer. The grammar writes their numbers out.
MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A function and the rule for its arguments, by name. has_schema: the rule holds a schema of the client's."""

    name: str
    arguments: str
    has_schema: bool


class CallGrammar:
    """Calls of `tools` and what begins and ends them.

    rules: where those of the arguments are.
    starts, pauses: as in Constraint; empty when the checkpoint has no token for the markers.
    """

    def __init__(
        self,
        frame: CallFrame,
        spelling: Spelling,
        rules: RuleBook,
        tools: Sequence[ToolRule],
        *,
        first_number: int,
        only_one: bool,
    ) -> None:
        self._frame = frame
        self._spelling = spelling
        self._rules = rules
        self._tools = tools
        self._first_number = first_number
        self._only_one = only_one
        self._begin = spelling.of(frame.begin)
        self._end = spelling.of(frame.end)
        self._separator = f"{literal(frame.separator)}?" if frame.separator else ""

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
        opening = [self._token(self._frame.begin[:1])] if self._frame.begin else []
        call = self._token(self._frame.call[:1])
        if None in opening or (call is None and not opening):
            return {}
        begun = tuple(token_id for token_id in opening if token_id is not None)
        starts = {begun[0]: begun} if begun else {}
        # What stands between the section's marker and the call's is not skipped.
        return starts if call is None or len(self._frame.begin) > 1 else starts | {call: (*begun, call)}

    @property
    def pauses(self) -> tuple[int, ...]:
        """The marker after which there may be text again."""
        token_id = self._token((self._frame.end or self._frame.call)[-1:])
        return () if token_id is None else (token_id,)

    def _token(self, pieces: Sequence[Piece | Slot]) -> int | None:
        """The token that a piece is."""
        return next((self._spelling.marker_ids.get(piece.name) for piece in pieces if isinstance(piece, Marker)), None)

    def text(self, start: str, *, first_number: int | None = None) -> str:
        """The whole grammar; `start`: the body of its first rule, in which `calls` are these calls.

        `first_number`: another one for the first call. After the end of a section another one may begin.
        """
        alternatives = "\n | ".join(map(self._call, self._tools))
        if Slot.NUMBER in self._frame.call:
            first = self._first_number if first_number is None else first_number
            run = self._numbered_run(alternatives, first)
        else:
            run = self._plain_run(alternatives)
        lines = [f"start: {start}", *run, *self._rules.lines]
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

    def _call(self, tool: ToolRule) -> str:
        """One call of `tool`."""
        parts: list[str] = []
        text = ""
        for piece in self._frame.call:
            if isinstance(piece, str):
                text += piece
            elif piece in _NAMES:
                text += _NAMES[piece](tool.name)
            else:
                parts += [literal(text)] if text else []
                text = ""
                if isinstance(piece, Slot):
                    parts.append("number::_" if piece is Slot.NUMBER else tool.arguments)
                else:
                    parts.append(self._spelling.of((piece,)))
        parts += [literal(text)] if text else []
        return " ".join(parts)


def _quoted(name: str) -> str:
    quote = "'" if '"' in name else '"'
    return f"{quote}{name}{quote}"


# How a name is written, by slot.
_NAMES: Mapping[Any, Callable[[str], str]] = {
    Slot.NAME: str,
    Slot.JSON_NAME: lambda name: json.dumps(name, ensure_ascii=False)[1:-1],
    Slot.QUOTED_NAME: _quoted,
}
