"""Kimi K2, K2-Thinking, K2.5, K2.6 and K2.7-Code: reasoning, content and tool calls.

An assistant turn is `<think>reasoning</think>content SB (CB id AB arguments CE)+ SE`, each marker one token. Models
stray from it: sections without SB, calls without CE, a call inside an unfinished think, the singular spelling of the
section markers in plain text. What each of these means is in the table `_transitions` and the methods it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import IntEnum, auto
from typing import ClassVar

from proa.chat.output.calls import CallWriter
from proa.chat.output.events import ContentDelta, Event, Piece
from proa.chat.output.lexer import MarkerLexer, longest_suffix_in
from proa.chat.output.prose import ProseWriter
from proa.chat.output.tools import BLANKS, DeclaredTools

__all__ = ["MARKERS", "KimiK2Parser", "call_id", "call_name"]

SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
THINK = "<think>"
THINK_END = "</think>"
MARKERS = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END, THINK, THINK_END)

# The singular spelling is no token: the model writes it out in plain text.
_PLAIN_BEGIN = "<|tool_call_section_begin|>"
_PLAIN_END = "<|tool_call_section_end|>"
_BEGINNINGS = frozenset(spelling[:n] for spelling in (_PLAIN_BEGIN, _PLAIN_END) for n in range(1, len(spelling)))
_NUMBERED = re.compile(r"(.*):([0-9]+)", re.DOTALL)
_PREFIX = "functions."


class _State(IntEnum):
    # IntEnum: its hash is that of an int, and every token looks its state up.
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()  # inside a section, outside a call
    HEADER = auto()
    ARGUMENTS = auto()


def call_id(name: str, number: int) -> str:
    """The id Kimi knows a call by; `number` counts the calls of the whole conversation from 0."""
    return f"{_PREFIX}{name}:{number}"


def call_name(header: str, tools: DeclaredTools) -> str | None:
    """The name in a call's id text; None: to be inferred from the arguments; "": the call is broken."""
    header = header.strip(BLANKS)
    numbered = _NUMBERED.fullmatch(header)
    base = numbered[1] if numbered else header
    short = base.removeprefix(_PREFIX)
    for name in (short, base, header.removeprefix(_PREFIX), header):
        if name in tools.names:
            return name
    if numbered and short:
        return short
    return "" if header.startswith(_PREFIX) else None


class KimiK2Parser:
    """The parser of one answer. Time is linear in the text; nothing is held back longer than it has to be.

    Args:
        tools: what the request declares.
        in_reasoning: the answer begins inside `<think>`, because the prompt ends with it or the model always thinks.
        history_calls: tool calls earlier in the conversation.
        no_calls: `tool_choice` none: calls are consumed without a trace.
    """

    def __init__(
        self, tools: DeclaredTools, *, in_reasoning: bool, history_calls: int = 0, no_calls: bool = False
    ) -> None:
        self._state = _State.REASONING if in_reasoning else _State.CONTENT
        self._prose = ProseWriter()
        self._calls = CallWriter(
            tools,
            lambda header: call_name(header, tools),
            lambda name, index: call_id(name, history_calls + index),
            muted=no_calls,
        )
        self._lexer: MarkerLexer | None = None  # made for text only
        self._header: list[str] = []
        self._held: list[str] = []  # the beginning of a plain section marker, or a whole one with blanks after it
        self._holds_whole = False
        self._had_section = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        return self._state is _State.REASONING

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """Take text and marker tokens as the tokenizer tells them apart."""
        events: list[Event] = []
        for text, is_marker in pieces:
            if not is_marker:
                self._text[self._state](self, text, events)
                continue
            self._release(events, before=text)
            if (handler := self._transitions[self._state].get(text)) is not None:
                handler(self, events)
        return events

    def push_text(self, text: str) -> list[Event]:
        """Take text in which markers are spelled out. They cannot be told from a quotation of them."""
        if self._lexer is None:
            self._lexer = MarkerLexer(MARKERS)
        return self.push(self._lexer.push(text))

    def finish(self, *, is_cut: bool = False) -> list[Event]:  # noqa: ARG002 - arguments are the text as it is
        """The end of the output: everything held back, and what broken calls were written as if no call came out."""
        events = self.push(self._lexer.finish()) if self._lexer is not None else []
        self._release(events)
        if self._state is _State.ARGUMENTS:
            self._calls.end(events)
        if failed := self._calls.failed_text():
            events.append(ContentDelta(failed))
        return events

    # ---- text ----

    def _add_prose(self, text: str, events: list[Event]) -> None:
        """Text of REASONING or CONTENT; a plain section marker is held until it is clear what follows."""
        if not self._held and "<" not in text:
            self._tell(text, events)
            return
        if self._holds_whole and not text.strip(BLANKS):
            self._held.append(text)
            return
        text = "".join(self._held) + text
        body = text.rstrip(BLANKS)
        self._holds_whole = body.endswith(_PLAIN_BEGIN)
        if self._holds_whole:
            keep = len(text) - len(body) + len(_PLAIN_BEGIN)
        else:
            keep = longest_suffix_in(text[-len(_PLAIN_BEGIN) :], _BEGINNINGS, len(_PLAIN_BEGIN))
        self._held = [text[len(text) - keep :]] if keep else []
        self._tell(text[: len(text) - keep], events)

    def _add_between_calls(self, text: str, events: list[Event]) -> None:
        """Text of SECTION is dropped, but for the plain marker that ends the section."""
        text = "".join(self._held) + text
        before, end, after = text.partition(_PLAIN_END)
        if end:
            self._held = []
            self._end_section(events)
            self._add_prose(after, events)
            return
        keep = longest_suffix_in(before[-len(_PLAIN_END) :], _BEGINNINGS, len(_PLAIN_END))
        self._held = [before[len(before) - keep :]] if keep else []

    def _add_header(self, text: str, _events: list[Event]) -> None:
        self._header.append(text)

    def _add_arguments(self, text: str, events: list[Event]) -> None:
        self._calls.arguments(text, events)

    def _tell(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            self._prose.reasoning(text, events)
        else:
            self._prose.content(text, events)

    def _release(self, events: list[Event], before: str = "") -> None:
        """What was held back is text after all, unless it is a plain section marker `before` a call."""
        if not self._held:
            return
        if self._state is not _State.SECTION and not (self._holds_whole and before == CALL_BEGIN):
            self._tell("".join(self._held), events)
        self._held = []
        self._holds_whole = False

    # ---- markers ----

    def _repeat_think(self, events: list[Event]) -> None:
        self._prose.reasoning_tag(events)

    def _begin_reasoning(self, events: list[Event]) -> None:
        # Later than at the start the model quotes the tag.
        if not self._prose.has_content and not self._had_section:
            self._prose.end_segment()
            self._prose.reasoning_tag(events)
            self._state = _State.REASONING

    def _end_reasoning(self, events: list[Event]) -> None:
        self._prose.reasoning_tag(events)
        self._state = _State.CONTENT

    def _begin_section(self, _events: list[Event]) -> None:
        self._prose.end_segment()
        self._had_section = True
        self._state = _State.SECTION

    def _end_section(self, _events: list[Event]) -> None:
        self._state = _State.CONTENT

    def _begin_call(self, events: list[Event]) -> None:
        self._begin_section(events)
        self._header = []
        self._state = _State.HEADER

    def _begin_arguments(self, events: list[Event]) -> None:
        self._calls.begin("".join(self._header), events)
        self._state = _State.ARGUMENTS

    def _end_call(self, events: list[Event]) -> None:
        self._calls.end(events)
        self._state = _State.SECTION

    def _end_call_and_section(self, events: list[Event]) -> None:
        self._calls.end(events)
        self._state = _State.CONTENT

    def _end_call_and_begin(self, events: list[Event]) -> None:
        self._calls.end(events)
        self._begin_call(events)

    def _quote_think(self, events: list[Event]) -> None:
        self._calls.arguments(THINK, events, is_marker=True)

    def _quote_think_end(self, events: list[Event]) -> None:
        self._calls.arguments(THINK_END, events, is_marker=True)

    # ---- what is done in each state; markers that are not named are dropped ----

    _text: ClassVar[dict[_State, Callable[[KimiK2Parser, str, list[Event]], None]]] = {
        _State.REASONING: _add_prose,
        _State.CONTENT: _add_prose,
        _State.SECTION: _add_between_calls,
        _State.HEADER: _add_header,
        _State.ARGUMENTS: _add_arguments,
    }

    _transitions: ClassVar[dict[_State, dict[str, Callable[[KimiK2Parser, list[Event]], None]]]] = {
        _State.REASONING: {
            THINK_END: _end_reasoning,
            THINK: _repeat_think,
            SECTION_BEGIN: _begin_section,
            CALL_BEGIN: _begin_call,
        },
        _State.CONTENT: {THINK: _begin_reasoning, SECTION_BEGIN: _begin_section, CALL_BEGIN: _begin_call},
        _State.SECTION: {CALL_BEGIN: _begin_call, SECTION_END: _end_section},
        _State.HEADER: {
            ARGUMENT_BEGIN: _begin_arguments,
            CALL_BEGIN: _begin_call,
            CALL_END: _begin_section,
            SECTION_BEGIN: _begin_section,
            SECTION_END: _end_section,
        },
        _State.ARGUMENTS: {
            CALL_END: _end_call,
            SECTION_BEGIN: _end_call,
            CALL_BEGIN: _end_call_and_begin,
            SECTION_END: _end_call_and_section,
            THINK: _quote_think,
            THINK_END: _quote_think_end,
        },
    }
