"""The parsers of all families, by the names that `--tool-call-parser` takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from proa.chat.output import (
    deepseek_v3,
    deepseek_v31,
    deepseek_v32,
    glm45,
    kimi_k2,
    minimax_m2,
    mistral,
    qwen3,
    qwen3_coder,
)
from proa.chat.output.events import Event, Piece
from proa.chat.output.json_body import JsonBody
from proa.chat.output.lexer import MarkerLexer
from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat
from proa.chat.output.tools import DeclaredTools
from proa.core.errors import UnsupportedError

__all__ = ["ALIASES", "FAMILIES", "OutputFamily", "OutputParser", "output_family"]


class OutputParser(Protocol):
    """Reads one answer as it is generated. What comes out does not depend on how the input is cut."""

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

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The end of the output: flushes everything. `is_cut`: the model was not done."""
        ...


class _Factory(Protocol):
    def __call__(
        self,
        tools: DeclaredTools,
        *,
        in_reasoning: bool,
        history_calls: int = 0,
        no_calls: bool = False,
        spelled: Collection[str] = (),
    ) -> OutputParser: ...


@dataclass(frozen=True, slots=True)
class OutputFamily:
    """How a family of models writes.

    name: what `--tool-call-parser` calls it. markers: the names of its marker tokens. parser: makes the parser for one
    answer; `spelled`: the markers that the checkpoint has no token for. history_id: (name, number) -> the id that a
    call of the history gets in a prompt.
    """

    name: str
    markers: tuple[str, ...]
    parser: _Factory
    history_id: Callable[[str, int], str]


class _SpelledKimiParser(kimi_k2.KimiK2Parser):
    """For a checkpoint that has no token for some of the markers: these are looked for in text."""

    def __init__(self, tools: DeclaredTools, spelled: Collection[str], **options: Any) -> None:
        super().__init__(tools, **options)
        self._spelled = MarkerLexer(spelled)

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """Take text and those markers that are tokens."""
        events: list[Event] = []
        for text, is_marker in pieces:
            found = [*self._spelled.finish(), (text, True)] if is_marker else self._spelled.push(text)
            events += super().push(found)
        return events

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The end of the output: flushes everything."""
        return super().push(self._spelled.finish()) + super().finish(is_cut=is_cut)


def _kimi(tools: DeclaredTools, *, spelled: Collection[str] = (), **options: Any) -> OutputParser:
    return _SpelledKimiParser(tools, spelled, **options) if spelled else kimi_k2.KimiK2Parser(tools, **options)


def _family(name: str, form: OutputFormat) -> OutputFamily:
    """The family that writes in a format of the table-driven machine."""

    def parser(tools: DeclaredTools, *, history_calls: int = 0, **options: Any) -> OutputParser:  # noqa: ARG001
        # Ids are the same for any number of calls before.
        return CallMachine(form, tools, **options)

    return OutputFamily(name, (*form.tokens, *form.text_tokens), parser, _history_id)


def _history_id(_name: str, number: int) -> str:
    # Few templates write ids; Mistral's take those of nine letters and digits only.
    return f"{number:09d}"


_FORMATS: dict[str, OutputFormat] = {
    "deepseek_v3": deepseek_v3.FORMAT,
    "deepseek_v31": deepseek_v31.FORMAT,
    "deepseek_v32": deepseek_v32.FORMAT,
    "glm45": glm45.FORMAT,
    "glm47": glm45.FORMAT,
    "minimax_m2": minimax_m2.FORMAT,
    "mistral": mistral.FORMAT,
    "none": OutputFormat(tokens=(THINK, THINK_END), table={}, body=JsonBody),
    "qwen3": qwen3.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
}
FAMILIES: dict[str, OutputFamily] = {
    "kimi_k2": OutputFamily("kimi_k2", kimi_k2.MARKERS, _kimi, kimi_k2.call_id),
    **{name: _family(name, form) for name, form in _FORMATS.items()},
}

# Other servers' names for the same.
ALIASES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "glm": "glm45",
    "hermes": "qwen3",
    "minimax-m2": "minimax_m2",
    "qwen": "qwen3",
    "qwen25": "qwen3",
}


def output_family(name: str, *, has_reasoning: bool = True) -> OutputFamily:
    """The family `name`; without `has_reasoning` think tags are content. UnsupportedError for another name."""
    name = ALIASES.get(name, name)
    if name not in FAMILIES:
        raise UnsupportedError("--tool-call-parser", f"one of {', '.join(sorted(FAMILIES))}", repr(name))
    if has_reasoning:
        return FAMILIES[name]
    if name not in _FORMATS:
        raise UnsupportedError("--reasoning-parser", f"one beside --tool-call-parser {name}", "none", "leave it out")
    form = _FORMATS[name]
    tokens = tuple(token for token in form.tokens if token not in {THINK, THINK_END})
    return _family(name, replace(form, tokens=tokens))
