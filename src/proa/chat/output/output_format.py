"""How a family writes an answer, as data: states, markers, and what a marker does in each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Protocol

from proa.chat.output.calls import CallWriter
from proa.chat.output.events import Event
from proa.chat.output.tools import BLANKS, DeclaredTools

if TYPE_CHECKING:  # the machine reads formats, formats name its actions
    from proa.chat.output.machine import CallMachine

__all__ = ["THINK", "THINK_END", "Action", "Body", "OutputFormat", "State"]

THINK = "<think>"
THINK_END = "</think>"


class State(IntEnum):
    """Where in an answer the machine is."""

    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()  # inside a section of calls, outside a call
    MAYBE_NAME = auto()  # in what is the header of a call if it names a declared tool, and text if not
    TYPE = auto()  # in the header of a call, before or behind its name
    NAME = auto()
    BODY = auto()  # inside a call, between its parameters
    KEY = auto()
    VALUE = auto()
    ARGUMENTS = auto()  # JSON as the model writes it


class Body(Protocol):
    """Turns what stands inside a call into the call. Formats without parameters of their own use `text` only."""

    def begin(self, name: str, events: list[Event]) -> None:
        """A call whose header is complete."""
        ...

    def text(self, text: str, events: list[Event], *, is_marker: bool = False) -> None:
        """Text of ARGUMENTS or VALUE; `is_marker`: a marker that counts as text there."""
        ...

    def open_value(self, header: str, events: list[Event]) -> None:
        """A parameter whose name is complete; its value follows as `text`."""
        ...

    def close_value(self, events: list[Event]) -> None:
        """The end of a value."""
        ...

    def end(self, events: list[Event], *, is_cut: bool = False) -> None:
        """The call is complete; `is_cut`: generation ended inside it, and its arguments must not look complete."""
        ...


# What a marker does. True: the state it led to has to look at the marker again.
Action = Callable[["CallMachine", list[Event]], "bool | None"]


def _trimmed(header: str) -> str:
    return header.strip(BLANKS)


@dataclass(frozen=True, slots=True, eq=False)
class OutputFormat:
    """How a family writes.

    tokens: markers that its checkpoints have as one token; they count in every state, where the table does not name
        them they are dropped. The table's other markers are always spelled out.
    text_tokens: tokens that are a part of such a marker; they are text, though a tokenizer may call them special.
    table: state -> marker -> what it does. No marker may be the beginning of another one of the same state.
    body: makes the reader of what stands inside calls.
    name: the header of a call -> the name in it.
    """

    tokens: tuple[str, ...]
    table: Mapping[State, Mapping[str, Action]]
    body: Callable[[CallWriter, DeclaredTools], Body]
    name: Callable[[str], str] = _trimmed
    text_tokens: tuple[str, ...] = ()
