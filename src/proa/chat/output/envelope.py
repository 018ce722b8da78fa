"""Calls written as one JSON object with their name inside: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import re

from proa.chat.output.calls import CallWriter
from proa.chat.output.events import Event
from proa.chat.output.tools import BLANKS, DeclaredTools, parse_json

__all__ = ["EnvelopeBody"]

_ARGUMENTS = ("arguments", "parameters")
_OUTSIDE = re.compile(r'["{}\[\],:]')
_IN_STRING = re.compile(r'["\\]')


class EnvelopeBody:
    """Reads the object as it arrives. Arguments are told byte by byte as soon as the name is known.

    Several objects one behind the other are several calls; what stands between and behind them is dropped. An object
    without a name is inferred from its arguments; one without either was no call.
    """

    def __init__(self, calls: CallWriter, _tools: DeclaredTools) -> None:
        self._calls = calls
        self._reset()

    def _reset(self) -> None:
        self._is_bare = False  # the arguments alone: the header had the name
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key = ""  # of the value that is read, "" before its colon
        self._token: list[str] = []  # what has been read of a key or of the name
        self._name: str | None = None
        self._has_arguments = False
        self._is_begun = False
        self._early: list[tuple[str, bool]] = []  # arguments that came before the name
        self._raw: list[str] = []

    def begin(self, name: str, events: list[Event]) -> None:
        """A call begins; an empty `name` comes later."""
        self._reset()
        if name:
            self._is_bare = True
            self._name = name
            self._begin(events)

    def open_value(self, _header: str, _events: list[Event]) -> None:
        """There are no parameters."""

    def close_value(self, _events: list[Event]) -> None:
        """There are no parameters."""

    def text(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """More of the object."""
        if self._is_bare:
            self._calls.arguments(text, events, is_marker=is_marker)
            return
        if is_marker:
            self._take(text, events, is_marker=True)
            return
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                end = position + 1
                self._read(text[position:end], events)
            else:
                match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, position)
                if match is None:
                    self._read(text[position:] if position else text, events)
                    return
                self._read(text[position : match.start()], events)
                self._structure(match[0], events)
                end = match.end()
            position = end

    def end(self, events: list[Event], *, is_cut: bool = False) -> None:
        """The end of the marker around the object, wherever that is."""
        if self._is_begun or not is_cut:
            self._close(events)

    def _read(self, text: str, events: list[Event]) -> None:
        if self._is_begun and self._key in _ARGUMENTS:  # most tokens
            self._calls.arguments(text, events)
            return
        if not self._is_begun:
            self._raw.append(text)
        self._take(text, events)

    def _structure(self, character: str, events: list[Event]) -> None:
        """A character that means something in JSON."""
        if not self._is_begun:
            self._raw.append(character)
        if self._depth == 0:
            self._depth = int(character == "{")
        elif self._in_string:
            self._in_string = character != '"'
            self._is_escaped = character == "\\"
            self._take(character, events)
        elif character == '"':
            self._in_string = True
            self._take(character, events)
        elif self._depth == 1 and character in ":,}":
            self._between(character, events)
        else:
            self._depth += (character in "{[") - (character in "]}")
            self._take(character, events)

    def _between(self, character: str, events: list[Event]) -> None:
        """What separates the entries of the object itself."""
        if character == ":" and not self._key:
            self._key = _text_of(self._token) or "?"
            self._token = []
            if self._key in _ARGUMENTS and self._has_arguments:
                self._key = "?"
            self._has_arguments = self._has_arguments or self._key in _ARGUMENTS
            return
        if self._key == "name" and self._name is None:
            self._name = _text_of(self._token)
            self._begin(events)
        self._key = ""
        self._token = []
        if character == "}":
            self._close(events)
            self._reset()

    def _take(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """Text of a key, of the name or of the arguments."""
        if self._key in _ARGUMENTS:
            if self._is_begun:
                self._calls.arguments(text, events, is_marker=is_marker)
            else:
                self._early.append((text, is_marker))
        elif self._depth == 1 and self._key in {"", "name"} and not is_marker:
            self._token.append(text)

    def _begin(self, events: list[Event]) -> None:
        self._is_begun = True
        self._calls.begin(self._name or "", events)
        for text, is_marker in self._early:
            self._calls.arguments(text, events, is_marker=is_marker)
        self._early = []

    def _close(self, events: list[Event]) -> None:
        if not self._is_begun:
            if not self._has_arguments:
                self._calls.fail("".join(self._raw))
                self._raw = []
                return
            self._begin(events)
        self._calls.end(events)


def _text_of(token: list[str]) -> str:
    """The string that was read, empty if it is none."""
    value = parse_json("".join(token).strip(BLANKS))
    return value if isinstance(value, str) else ""
