"""How the events of each API look on the wire, and what every format of an answer gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from proa.server.assembler import Delta
from proa.server.errors import ErrorShape, anthropic_error, openai_error
from proa.server.generation import Usage
from proa.server.generation_request import StreamOptions

__all__ = ["ANTHROPIC_EVENTS", "OPENAI_CHUNKS", "RESPONSES_EVENTS", "AnswerFormat", "Event", "Framing", "add_usage"]

# The JSON object of one event.
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Framing:
    """The server-sent events of one API.

    is_named: an event has a line with its name, which is its `type`. end: what follows the last event.
    error_shape: its errors, before and within a stream.
    """

    is_named: bool
    end: bytes
    error_shape: ErrorShape

    def frame(self, event: Event) -> bytes:
        """`event` as bytes."""
        data = b"data: " + msgspec.json.encode(event) + b"\n\n"
        return b"event: " + event["type"].encode() + b"\n" + data if self.is_named else data


OPENAI_CHUNKS = Framing(is_named=False, end=b"data: [DONE]\n\n", error_shape=openai_error)
RESPONSES_EVENTS = Framing(is_named=True, end=b"", error_shape=openai_error)
ANTHROPIC_EVENTS = Framing(is_named=True, end=b"", error_shape=anthropic_error)


class AnswerFormat(Protocol):
    """How the deltas of an answer become the bodies of one API."""

    framing: Framing

    def opening(self, usage: Usage) -> Iterator[Event]:
        """What opens a stream."""
        ...

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[Event]:
        """What is new."""
        ...

    def closing(self, usage: Usage) -> Iterator[Event]:
        """What ends a stream."""
        ...

    def silence(self) -> Iterator[Event]:
        """Events of an opened stream for while nothing is new, for clients that pass over comments."""
        ...

    def failure(self, error: Event) -> Event:
        """What ends a stream that failed; `error`: the body of an error response."""
        ...

    def response(self, deltas: Iterable[Delta], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        ...


def add_usage(chunk: Event, options: StreamOptions, usage: Callable[[], Usage]) -> None:
    """The usage in a chunk of a stream, where OpenAI has it: null before the end unless asked for all along."""
    if options.continuous_usage_stats:
        chunk["usage"] = usage().as_dict()
    elif options.include_usage:
        chunk["usage"] = None
