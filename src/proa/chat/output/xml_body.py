"""Calls whose parameters are written one by one, as text: converted to JSON by the tool's schema while they arrive.

A value that can only be a string is told as it arrives. Any other is held until its end, or until its first character
shows that it is a string after all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from proa.chat.output.calls import CallWriter
from proa.chat.output.events import Event
from proa.chat.output.tools import BLANKS, DeclaredTools, parse_json

__all__ = ["Parameter", "XmlBody", "as_json", "attribute_name", "attribute_parameter", "plain_parameter"]

# JSON's form of a string, non-ASCII characters as they are.
_quoted = json.encoder.encode_basestring
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# What a value of each type may begin with, in JSON or as Python writes it.
_FIRST = {
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tfTF",
    "null": "nN",
    "object": "{",
    "array": "[",
}
_PYTHON = {"object": dict, "array": list}
_ATTRIBUTE = re.compile(r"""\s([a-z]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")


@dataclass(frozen=True, slots=True)
class Parameter:
    """The header of a parameter; `is_string`: what it says about its type, None: ask the schema."""

    name: str
    is_string: bool | None = None


def plain_parameter(header: str) -> Parameter:
    """A header that is the name."""
    return Parameter(header)


def attribute_parameter(header: str) -> Parameter:
    """A header with the attributes `name` and maybe `string`."""
    attributes = _attributes(header)
    string = attributes.get("string")
    return Parameter(attributes.get("name", ""), None if string is None else string == "true")


def attribute_name(header: str) -> str:
    """The attribute `name` of a call's header."""
    return _attributes(header).get("name", "").strip(BLANKS)


def _attributes(header: str) -> dict[str, str]:
    return {key: a or b or c for key, a, b, c in _ATTRIBUTE.findall(header)}


class XmlBody:
    """The arguments of one call after another.

    Args:
        read: the header of a parameter -> what it says.
        has_line_breaks: values stand on lines of their own; one line break on either side is not theirs.
    """

    def __init__(
        self,
        calls: CallWriter,
        tools: DeclaredTools,
        *,
        read: Callable[[str], Parameter] = plain_parameter,
        has_line_breaks: bool = False,
    ) -> None:
        self._calls = calls
        self._tools = tools
        self._read = read
        self._has_line_breaks = has_line_breaks
        self._num_parameters = 0
        self._is_raw = False  # the arguments are one JSON object as the model writes it
        self._parameter: str | None = None  # whose value is read; a value without a name is dropped
        self._types: frozenset[str] = frozenset()
        self._is_string: bool | None = None  # None: not known before its first character
        self._is_told = False  # the value is a string that has been begun
        self._held: list[str] = []
        self._has_marker = False

    def begin(self, name: str, events: list[Event]) -> None:
        """A call whose header is complete."""
        self._calls.begin(name, events)
        self._num_parameters = 0
        self._is_raw = False
        self._parameter = None

    def open_value(self, header: str, events: list[Event]) -> None:
        """A parameter whose name is complete."""
        self.close_value(events)
        parameter = self._read(header)
        tool, name = self._calls.name or "", parameter.name
        self._parameter = name if self._tools.declares(tool, name) else name.strip(BLANKS)
        self._types = frozenset({"string"})
        if parameter.is_string is not True:
            types = self._tools.value_types(tool, self._parameter)
            self._types = types - {"string"} if parameter.is_string is False and types != self._types else types
        self._is_string = True if self._types == {"string"} else None if "string" in self._types else False
        self._is_told = False
        self._has_marker = False
        self._held = []

    def text(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """More of the value, or of the one JSON object that stands for all of them."""
        if self._is_told and not (is_marker or self._held or self._has_marker or text[-1:] == "\n"):  # most tokens
            self._calls.arguments(_quoted(text)[1:-1], events)
            return
        if self._parameter is None:
            self._is_raw = True
            self._calls.arguments(text, events, is_marker=is_marker)
            return
        if not self._parameter:
            return
        self._has_marker = self._has_marker or is_marker
        self._held.append(text)
        if self._is_string is None and (first := text.lstrip(BLANKS)[:1]):
            self._is_string = not any(first in _FIRST[kind] for kind in self._types - {"string"})
        if self._is_string:
            self._tell_string(events, is_end=False)

    def close_value(self, events: list[Event]) -> None:
        """The value is complete."""
        if not self._parameter:
            self._parameter = None
            return
        if self._is_string:
            self._tell_string(events, is_end=True)
        else:
            value = "".join(self._held)
            self._tell_key(events)
            self._tell(as_json(value, self._types) or _quoted(self._without_line_breaks(value)), events)
        self._parameter = None
        self._is_told = False

    def end(self, events: list[Event], *, is_cut: bool = False) -> None:
        """The call is complete, or generation ended inside it."""
        if not is_cut:
            self.close_value(events)
            if self._num_parameters:
                self._calls.arguments("}", events)
        elif not self._num_parameters and not self._is_raw:
            self._calls.arguments("{", events)
        self._parameter = None
        self._is_told = False
        self._calls.end(events)

    # ---- strings ----

    def _tell_string(self, events: list[Event], *, is_end: bool) -> None:
        """The text that is held, but for a line break that may be the last."""
        text = "".join(self._held)
        if not self._is_told:
            if not text and not is_end:
                return
            self._is_told = True
            self._tell_key(events)
            self._tell('"', events)
            if self._has_line_breaks:
                text = text.removeprefix("\n")
        self._held = []
        if self._has_line_breaks and text.endswith("\n"):
            text = text[:-1]
            if not is_end:
                self._held = ["\n"]
        self._tell(_quoted(text)[1:-1] + ('"' if is_end else ""), events)

    def _without_line_breaks(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._has_line_breaks else text

    def _tell_key(self, events: list[Event]) -> None:
        self._calls.arguments(f"{', ' if self._num_parameters else '{'}{_quoted(self._parameter or '')}: ", events)
        self._num_parameters += 1

    def _tell(self, text: str, events: list[Event]) -> None:
        if text:
            self._calls.arguments(text, events, is_marker=self._has_marker)


def as_json(text: str, types: frozenset[str]) -> str | None:
    """`text` as a JSON value of one of `types` other than string, None when it is none."""
    text = text.strip(BLANKS)
    lower = text.lower()
    if "null" in types and (text in {"null", "None"} or (lower == "null" and "string" not in types)):
        return "null"
    if "boolean" in types and lower in {"true", "false"}:
        return lower
    if types & {"integer", "number"} and _NUMBER.fullmatch(text):
        return text
    kinds = tuple(_PYTHON[kind] for kind in types if kind in _PYTHON)
    if text[:1] in ("{", "[", '"') and isinstance(parse_json(text), kinds if "string" in types else (*kinds, str)):
        return text
    return None
