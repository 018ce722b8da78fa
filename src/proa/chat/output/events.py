"""What the parser of a model's output tells the server, and the whole answer they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

__all__ = ["Answer", "ArgumentsDelta", "Call", "CallStart", "ContentDelta", "Event", "Piece", "ReasoningDelta"]

# Text of a model's output; True: it is one marker token, written out.
Piece = tuple[str, bool]


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More reasoning; an empty text says that there is reasoning, if an empty one."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More content, never empty."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. `index` counts the calls of this answer from 0; calls come one after another."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call that began last."""

    index: int
    text: str


Event = ReasoningDelta | ContentDelta | CallStart | ArgumentsDelta


@dataclass(slots=True)
class Call:
    """A whole tool call; `arguments` is the text the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The whole answer. None: there was none of it, "" for reasoning: the model opened it and wrote nothing."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Answer:
        """What the events of a whole stream add up to. Linear in their text."""
        content: list[str] = []
        reasoning: list[str] = []
        arguments: list[list[str]] = []
        answer = cls()
        for event in events:
            if isinstance(event, ContentDelta):
                content.append(event.text)
            elif isinstance(event, ReasoningDelta):
                reasoning.append(event.text)
            elif isinstance(event, CallStart):
                answer.calls.append(Call(event.id, event.name))
                arguments.append([])
            else:
                arguments[event.index].append(event.text)
        answer.content = "".join(content) if content else None
        answer.reasoning = "".join(reasoning) if reasoning else None
        for call, texts in zip(answer.calls, arguments, strict=True):
            call.arguments = "".join(texts)
        return answer

    def finish_reason(self, ended_by: str) -> str:
        """OpenAI's finish_reason; `ended_by`: why generation stopped, `length` or `stop`."""
        if ended_by == "length":
            return ended_by
        return "tool_calls" if self.calls else ended_by
