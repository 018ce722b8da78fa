"""Content and reasoning as they are written: blank segments of content vanish, all else passes byte by byte."""

from __future__ import annotations

from proa.chat.output.events import ContentDelta, Event, ReasoningDelta
from proa.chat.output.tools import BLANKS

__all__ = ["ProseWriter"]


class ProseWriter:
    """The text of one answer outside its tool calls.

    A segment of content ends where a tool section or reasoning begins. One that is blank is dropped: models put line
    breaks around their sections.
    """

    def __init__(self) -> None:
        self.has_content = False
        self._blanks: list[str] = []  # that the segment began with
        self._in_segment = False  # something of it that is not blank has been told
        self._has_reasoning = False

    def content(self, text: str, events: list[Event]) -> None:
        """More of the current segment."""
        if not self._in_segment:
            if not text.strip(BLANKS):
                self._blanks.append(text)
                return
            self._in_segment = self.has_content = True
            text = "".join(self._blanks) + text
        events.append(ContentDelta(text))

    def end_segment(self) -> None:
        """What comes next is another segment."""
        self._blanks = []
        self._in_segment = False

    def reasoning(self, text: str, events: list[Event]) -> None:
        """More reasoning."""
        if text:
            self._has_reasoning = True
            events.append(ReasoningDelta(text))

    def reasoning_tag(self, events: list[Event]) -> None:
        """The model opened or closed its reasoning: there is some, if an empty one."""
        if not self._has_reasoning:
            self._has_reasoning = True
            events.append(ReasoningDelta(""))
