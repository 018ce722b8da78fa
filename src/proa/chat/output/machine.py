"""The state machine behind all families but Kimi: a table says what each marker does in each state.

Markers come as tokens of their own or spelled out in text, by family and checkpoint; a state looks for its own markers
only, so text that merely resembles one of another state passes. Every character is looked at once per state it is
offered to: time is linear in the text, and what may be the beginning of a marker is all that is held back.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from proa.chat.output.calls import CallWriter
from proa.chat.output.events import ContentDelta, Event, Piece
from proa.chat.output.lexer import Markers
from proa.chat.output.output_format import THINK, THINK_END, Action, OutputFormat, State
from proa.chat.output.prose import ProseWriter
from proa.chat.output.tools import DeclaredTools

__all__ = ["CallMachine"]

# Attributes of an enum are slow to look up, and every token does.
_CONTENT, _REASONING, _VALUE, _ARGUMENTS = State.CONTENT, State.REASONING, State.VALUE, State.ARGUMENTS
_HEADER = frozenset({State.NAME, State.KEY, State.MAYBE_NAME})


@lru_cache(maxsize=256)
def _lexers(form: OutputFormat, spelled: frozenset[str]) -> dict[State, Markers]:
    """Lexers by state; `spelled`: the markers of `form.tokens` that text can spell."""
    actions = _actions(form)
    lexers = {}
    for state in State:
        if markers := set(actions[state]) - (set(form.tokens) - spelled):
            lexers[state] = Markers.of(markers)
    return lexers


@lru_cache(maxsize=64)
def _actions(form: OutputFormat) -> dict[State, dict[str, Action]]:
    """The whole table: with the think tags, and every token in every state."""
    actions: dict[State, dict[str, Action]] = {}
    for state in State:
        default = CallMachine.retract if state is State.MAYBE_NAME else CallMachine.drop
        actions[state] = dict.fromkeys(form.tokens, default)
        if THINK in form.tokens:
            actions[state] |= _THINK_ACTIONS.get(state, {})
        actions[state] |= form.table.get(state, {})
    return actions


class CallMachine:
    """The parser of one answer of a family that is described by an OutputFormat.

    Args:
        tools: what the request declares.
        in_reasoning: the answer begins inside `<think>`.
        no_calls: `tool_choice` none: calls are consumed without a trace.
        spelled: markers of `form.tokens` that this checkpoint has no token for.
    """

    def __init__(
        self,
        form: OutputFormat,
        tools: DeclaredTools,
        *,
        in_reasoning: bool,
        no_calls: bool = False,
        spelled: Collection[str] = (),
    ) -> None:
        self._form = form
        self._tools = tools
        self._state = State.REASONING if in_reasoning else State.CONTENT
        self._actions = _actions(form)
        self._tokens = frozenset(form.tokens) - frozenset(spelled)
        self._token_lexers = _lexers(form, frozenset(form.tokens) & frozenset(spelled))
        self._prose = ProseWriter()
        self._calls = CallWriter(tools, lambda name: _tool(name, tools), _new_id, muted=no_calls)
        self._body = form.body(self._calls, tools)
        self._header: list[str] = []
        self._held = ""
        self._had_section = False
        self._has_parameters = False  # the current call
        self._marker = ""  # the one an action is called for
        self._maybe = ("", State.CONTENT)  # the marker that led to MAYBE_NAME, and where it stood

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        return self._state is State.REASONING

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """Take text and marker tokens as the tokenizer tells them apart."""
        events: list[Event] = []
        for text, is_marker in pieces:
            if is_marker and text in self._tokens:
                self._release(events)
                self._mark(text, events)
                continue
            lexer = self._token_lexers.get(self._state)
            if self._held or (lexer is not None and not lexer.first.isdisjoint(text)):
                self._lex(text, self._token_lexers, events)
            else:  # most tokens
                self._text(text, events)
        return events

    def push_text(self, text: str) -> list[Event]:
        """Take text in which markers are spelled out. They cannot be told from a quotation of them."""
        events: list[Event] = []
        self._lex(text, _lexers(self._form, frozenset(self._form.tokens)), events)
        return events

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The end of the output: everything held back, and what broken calls were written as if no call came out.

        `is_cut`: the model was not done. Arguments it did not finish then stay unfinished JSON, lest half a value is
        taken for a whole one.
        """
        events: list[Event] = []
        self._release(events)
        if self._state is State.MAYBE_NAME:
            self.retract(events)
        if self._state in _INSIDE_CALL:
            self._body.end(events, is_cut=is_cut)
        if failed := self._calls.failed_text():
            events.append(ContentDelta(failed))
        return events

    # ---- text and markers ----

    def _lex(self, text: str, lexers: Mapping[State, Markers], events: list[Event]) -> None:
        if self._held:
            text, self._held = self._held + text, ""
        position = 0
        while position < len(text):
            lexer = lexers.get(self._state)
            match = lexer.search(text, position) if lexer is not None else None
            if match is None:
                keep = lexer.held(text, position) if lexer is not None else 0
                self._held = text[len(text) - keep :]
                self._text(text[position : len(text) - keep], events)
                return
            self._text(text[position : match.start()], events)
            self._marker = match[0]
            is_again = self._actions[self._state][match[0]](self, events)
            position = match.start() if is_again else match.end()

    def _mark(self, marker: str, events: list[Event]) -> None:
        self._marker = marker
        while self._actions[self._state][marker](self, events):
            pass

    def _release(self, events: list[Event]) -> None:
        held, self._held = self._held, ""
        self._text(held, events)

    def _text(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        state = self._state
        if state is _CONTENT:
            self._prose.content(text, events)
        elif state is _REASONING:
            self._prose.reasoning(text, events)
        elif state is _VALUE or state is _ARGUMENTS:
            self._body.text(text, events)
        elif state in _HEADER:
            self._header.append(text)

    # ---- actions ----

    def drop(self, _events: list[Event]) -> None:
        """The marker means nothing here."""

    def quote(self, events: list[Event]) -> None:
        """The marker is text of a value."""
        self._body.text(self._marker, events, is_marker=True)

    def repeat_think(self, events: list[Event]) -> None:
        """Reasoning begins once more."""
        self._prose.reasoning_tag(events)

    def begin_reasoning(self, events: list[Event]) -> None:
        """Reasoning begins; later than at the start the model quotes the tag."""
        if not self._prose.has_content and not self._had_section:
            self._prose.end_segment()
            self._prose.reasoning_tag(events)
            self._state = State.REASONING

    def end_reasoning(self, events: list[Event]) -> None:
        """Content follows."""
        self._prose.reasoning_tag(events)
        self._state = State.CONTENT

    def open_section(self, _events: list[Event]) -> None:
        """A section of calls begins, or a broken header in one ends."""
        self._prose.end_segment()
        self._had_section = True
        self._state = State.SECTION

    def close_section(self, _events: list[Event]) -> None:
        """Content follows; a header that is not complete is discarded."""
        self._state = State.CONTENT

    def open_call(self, events: list[Event]) -> None:
        """The header of a call begins, with a section or without."""
        self.open_section(events)
        self._header = []
        self._state = State.NAME

    def open_type(self, events: list[Event]) -> None:
        """The header of a call begins; its name comes later."""
        self.open_section(events)
        self._state = State.TYPE

    def close_header(self, _events: list[Event]) -> None:
        """What follows in the header is not the name."""
        self._state = State.TYPE

    def close_and_open_type(self, events: list[Event]) -> None:
        """The same where the end of a call is missing."""
        self._body.end(events)
        self.open_type(events)

    def open_maybe(self, _events: list[Event]) -> None:
        """A call outside a section, if it names a declared tool."""
        self._maybe = (self._marker, self._state)
        self._header = []
        self._state = State.MAYBE_NAME

    def confirm(self, events: list[Event]) -> bool:
        """The header of the maybe-call is complete."""
        header = self._header
        if self._form.name("".join(header)) not in self._tools.names:
            return self.retract(events)
        self.open_call(events)
        self._header = header
        return True

    def retract(self, events: list[Event]) -> bool:
        """It is no call: what looked like its beginning is text."""
        marker, self._state = self._maybe
        self._text("".join([marker, *self._header]), events)
        return True

    def close_name(self, events: list[Event]) -> None:
        """The header is complete, parameters follow."""
        self._body.begin(self._form.name("".join(self._header)), events)
        self._has_parameters = False
        self._state = State.BODY

    def open_arguments(self, events: list[Event]) -> None:
        """The header is complete, JSON follows."""
        self._body.begin(self._form.name("".join(self._header)), events)
        self._state = State.ARGUMENTS

    def open_arguments_here(self, events: list[Event]) -> bool:
        """The header is complete and the marker is the beginning of the JSON, or of what is around it."""
        self.open_arguments(events)
        return True

    def end_line(self, events: list[Event]) -> None:
        """The header is complete with its line, unless that is blank."""
        if self._form.name("".join(self._header)):
            self.open_arguments(events)

    def open_envelope(self, events: list[Event]) -> None:
        """A call begins whose name is inside its JSON."""
        self.open_section(events)
        self._body.begin("", events)
        self._state = State.ARGUMENTS

    def open_json(self, _events: list[Event]) -> bool:
        """One JSON object stands for all parameters, if it is the first thing in the call."""
        if self._has_parameters:
            return False
        self._state = State.ARGUMENTS
        return True

    def open_key(self, _events: list[Event]) -> None:
        """The name of a parameter begins."""
        self._header = []
        self._state = State.KEY

    def close_name_here(self, events: list[Event]) -> bool:
        """The header is complete and the marker belongs to the first parameter."""
        self.close_name(events)
        self._header = []
        return True

    def close_key(self, _events: list[Event]) -> None:
        """The name of a parameter is complete, its value does not begin yet."""
        self._state = State.BODY

    def open_value(self, events: list[Event]) -> None:
        """The value of the parameter that was named last begins."""
        self._body.open_value("".join(self._header), events)
        self._has_parameters = True
        self._state = State.VALUE

    def close_value(self, events: list[Event]) -> None:
        """The value is complete."""
        self._body.close_value(events)
        self._header = []
        self._state = State.BODY

    def close_call(self, events: list[Event]) -> None:
        """The call is complete, its section goes on."""
        self._body.end(events)
        self._state = State.SECTION

    def close_call_and_section(self, events: list[Event]) -> None:
        """The call and its section are complete."""
        self._body.end(events)
        self._state = State.CONTENT

    def close_and_open_call(self, events: list[Event]) -> None:
        """The next call begins where the end of one is missing."""
        self._body.end(events)
        self.open_call(events)

    def close_and_open_envelope(self, events: list[Event]) -> None:
        """The next call begins where the end of one is missing; its name is inside its JSON."""
        self._body.end(events)
        self.open_envelope(events)

    def close_bare_call(self, events: list[Event]) -> None:
        """A header and nothing else is a call without arguments; an empty one is none."""
        if name := self._form.name("".join(self._header)):
            self._body.begin(name, events)
            self._body.end(events)
        self._state = State.CONTENT


_INSIDE_CALL = frozenset({State.BODY, State.KEY, State.VALUE, State.ARGUMENTS})
_THINK_ACTIONS: Mapping[State, Mapping[str, Action]] = {
    State.REASONING: {THINK: CallMachine.repeat_think, THINK_END: CallMachine.end_reasoning},
    State.CONTENT: {THINK: CallMachine.begin_reasoning},
    State.VALUE: {THINK: CallMachine.quote, THINK_END: CallMachine.quote},
    State.ARGUMENTS: {THINK: CallMachine.quote, THINK_END: CallMachine.quote},
}


def _tool(name: str, tools: DeclaredTools) -> str | None:
    """The tool a header names; None: to be inferred from the arguments."""
    return name if name in tools.names else name.removeprefix("functions.") or None


def _new_id(_name: str, _index: int) -> str:
    # Clients keep calls by id, some beyond one conversation.
    return f"call_{secrets.token_hex(12)}"
