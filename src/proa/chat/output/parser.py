"""The parsers of all families, by the names that `--tool-call-parser` takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from proa.chat.output import kimi_k2
from proa.chat.output.events import Event, Piece
from proa.chat.output.tools import DeclaredTools
from proa.core.errors import UnsupportedError

__all__ = ["FAMILIES", "OutputFamily", "OutputParser", "output_family"]


class OutputParser(Protocol):
    """Reads one answer as it is generated. What comes out does not depend on how the input is cut."""

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        ...

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """Take text and marker tokens, told apart by their token ids."""
        ...

    def push_text(self, text: str) -> list[Event]:
        """Take text in which markers are spelled out."""
        ...

    def finish(self) -> list[Event]:
        """The end of the output: flushes everything."""
        ...


class _Factory(Protocol):
    def __call__(
        self, tools: DeclaredTools, *, in_reasoning: bool, history_calls: int = 0, no_calls: bool = False
    ) -> OutputParser: ...


@dataclass(frozen=True, slots=True)
class OutputFamily:
    """How a family of models writes: its marker tokens and the parser for one answer."""

    markers: tuple[str, ...]
    parser: _Factory


FAMILIES: dict[str, OutputFamily] = {
    "kimi_k2": OutputFamily(kimi_k2.MARKERS, kimi_k2.KimiK2Parser),
}


def output_family(name: str) -> OutputFamily:
    """The family `name`. UnsupportedError listing all of them for another name."""
    if (family := FAMILIES.get(name)) is None:
        raise UnsupportedError("--tool-call-parser", f"one of {', '.join(sorted(FAMILIES))}", repr(name))
    return family
