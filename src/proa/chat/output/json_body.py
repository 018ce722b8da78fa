"""Calls whose arguments are JSON as the model writes it: alone, or inside a code fence."""

from __future__ import annotations

from proa.chat.output.calls import CallWriter
from proa.chat.output.events import Event
from proa.chat.output.tools import BLANKS, DeclaredTools

__all__ = ["FencedJsonBody", "JsonBody"]

_FENCE = "```"
_FENCE_BEGIN = "```json"
# What the closing fence consists of.
_MAYBE_BEHIND = BLANKS + "`"


class JsonBody:
    """Arguments that are passed on byte by byte."""

    def __init__(self, calls: CallWriter, _tools: DeclaredTools) -> None:
        self._calls = calls

    def begin(self, name: str, events: list[Event]) -> None:
        """A call whose header is complete."""
        self._calls.begin(name, events)

    def text(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """More of the arguments."""
        self._calls.arguments(text, events, is_marker=is_marker)

    def open_value(self, _header: str, _events: list[Event]) -> None:
        """There are no parameters."""

    def close_value(self, _events: list[Event]) -> None:
        """There are no parameters."""

    def end(self, events: list[Event], *, is_cut: bool = False) -> None:  # noqa: ARG002 - the text is what it is
        """The call is complete."""
        self._calls.end(events)


class FencedJsonBody(JsonBody):
    """Arguments inside a Markdown code fence, which may be missing on either side."""

    def __init__(self, calls: CallWriter, tools: DeclaredTools) -> None:
        super().__init__(calls, tools)
        self._before = ""  # what may be the opening fence
        self._has_begun = False
        self._behind: list[str] = []  # what may be the closing one

    def begin(self, name: str, events: list[Event]) -> None:
        """A call whose header is complete."""
        self._before = ""
        self._has_begun = False
        self._behind = []
        super().begin(name, events)

    def text(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """More of the arguments, with the fence around them."""
        if self._has_begun and not is_marker and not self._behind and text[-1:] not in _MAYBE_BEHIND:  # most tokens
            self._calls.arguments(text, events)
            return
        if is_marker:
            self._begin_arguments(events)
            self._pass("", text, events, is_marker=True)
            return
        if not self._has_begun:
            self._before += text
            if _FENCE_BEGIN.startswith(self._before.lstrip(BLANKS)):
                return
            text = self._without_fence()
        body = text.rstrip(_MAYBE_BEHIND)
        if body:
            self._pass(body, "", events)
        if len(body) < len(text):
            self._behind.append(text[len(body) :])

    def end(self, events: list[Event], *, is_cut: bool = False) -> None:
        """The call is complete, with or without a closing fence."""
        self._begin_arguments(events)
        behind = "".join(self._behind).rstrip(BLANKS).removesuffix(_FENCE)
        super().text(behind, events)
        super().end(events, is_cut=is_cut)

    def _begin_arguments(self, events: list[Event]) -> None:
        if not self._has_begun:
            self._pass(self._without_fence(), "", events)

    def _without_fence(self) -> str:
        self._has_begun = True
        text = self._before.lstrip(BLANKS)
        if _FENCE_BEGIN.startswith(text):  # and nothing behind it
            return ""
        return text.removeprefix(_FENCE_BEGIN) if text.startswith(_FENCE_BEGIN) else text.removeprefix(_FENCE)

    def _pass(self, body: str, marker: str, events: list[Event], *, is_marker: bool = False) -> None:
        super().text("".join(self._behind) + body, events)
        self._behind = []
        if is_marker:
            super().text(marker, events, is_marker=True)
