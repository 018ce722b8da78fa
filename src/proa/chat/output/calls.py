"""Tool calls as they are written: arguments trimmed while they stream, names found or inferred, indices dense."""

from __future__ import annotations

from collections.abc import Callable

from proa.chat.output.events import ArgumentsDelta, CallStart, Event
from proa.chat.output.tools import BLANKS, DeclaredTools, unwrap_object

__all__ = ["CallWriter", "NameRule"]

# The name a call's header gives; None: infer it from the arguments; "": the call is broken.
NameRule = Callable[[str], str | None]


class CallWriter:
    """The calls of one answer, one after another.

    Args:
        tools: what the request declares, to infer names.
        name_of: the name in a header, see NameRule.
        id_of: (name, index in this answer) -> the id the client sees.
        muted: consume calls without a trace (`tool_choice` none).
    """

    def __init__(
        self, tools: DeclaredTools, name_of: NameRule, id_of: Callable[[str, int], str], *, muted: bool
    ) -> None:
        self._tools = tools
        self._name_of = name_of
        self._id_of = id_of
        self._muted = muted
        self._failed: list[str] = []
        self.num_calls = 0
        self._name: str | None = None
        self._kept: list[str] = []  # arguments not told yet: all of a held call, or trailing blanks
        self._written: list[str] = []  # the header and arguments of a held call without markers
        self._is_held = False
        self._has_begun = False  # the first of the arguments that is not blank has been seen

    @property
    def name(self) -> str | None:
        """The name of the call that was begun last; None when it is to be inferred."""
        return self._name

    def begin(self, header: str, events: list[Event]) -> None:
        """A call whose header is complete."""
        self._written = [header]
        self._name = self._name_of(header)
        self._kept = []
        self._is_held = not self._name
        self._has_begun = False
        if not self._is_held and not self._muted:
            self._start(events)

    def arguments(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """More arguments of the call that was begun; `is_marker`: a marker that counts as text here."""
        if self._muted:
            return
        if self._is_held:
            self._kept.append(text)
            if not is_marker:
                self._written.append(text)
            return
        if not self._has_begun:
            text = text.lstrip(BLANKS)
            if not text:
                return
            self._has_begun = True
            if text[0] == '"':
                # Maybe a JSON string that holds the object: known at its end.
                self._is_held = True
                self._kept.append(text)
                return
        body = text.rstrip(BLANKS)
        if not body:
            self._kept.append(text)
            return
        blanks = text[len(body) :]
        if self._kept:
            body = "".join(self._kept) + body
            self._kept = []
        if blanks:
            self._kept.append(blanks)
        events.append(ArgumentsDelta(self.num_calls - 1, body))

    def end(self, events: list[Event]) -> None:
        """The call that was begun is complete, or as complete as it gets."""
        if self._muted:
            return
        if not self._is_held:
            if not self._has_begun:
                events.append(ArgumentsDelta(self.num_calls - 1, "{}"))
            return
        arguments = "".join(self._kept).strip(BLANKS)
        if arguments.startswith('"'):
            arguments = unwrap_object(arguments) or arguments
        if self._name is None:
            self._name = self._tools.infer(arguments) or ""
        if not self._name:
            self._failed.append("".join(self._written))
            return
        if not self._has_begun:
            self._start(events)
        events.append(ArgumentsDelta(self.num_calls - 1, arguments or "{}"))

    def fail(self, text: str) -> None:
        """What was written as a call and is none."""
        if not self._muted:
            self._failed.append(text)

    def failed_text(self) -> str:
        """What the broken calls were written as, to be shown when there is no call at all."""
        return "" if self.num_calls else "".join(text for text in self._failed if text.strip(BLANKS))

    def _start(self, events: list[Event]) -> None:
        assert self._name
        events.append(CallStart(self.num_calls, self._id_of(self._name, self.num_calls), self._name))
        self.num_calls += 1
