"""Pieces of grammars in llguidance's Lark: literals, markers, and rules that are named as they are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Marker", "Maybe", "Pattern", "Piece", "RuleBook", "Spelling", "escaped", "inside_slashes", "literal"]


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of the family, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that fits a regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Pieces that may be left out."""

    pieces: tuple[str | Marker | Pattern, ...]


Piece = str | Marker | Pattern | Maybe


class RuleBook:
    """Rules beside the first ones, each body once."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def rule(self, body: str, prefix: str = "part") -> str:
        """The name of the rule `body`."""
        return self._names.setdefault((prefix, body), f"{prefix}_{len(self._names)}")

    def terminal(self, body: str) -> str:
        """The name of regular expressions joined by `&` and `~`."""
        return self.rule(body, "TEXT")

    def lazy(self, body: str) -> str:
        """The name of the shortest match of regular expressions; what follows begins right behind it."""
        return self.rule(self.terminal(body), "lazy")

    @property
    def lines(self) -> list[str]:
        """All rules."""
        return [f"{name}{'[lazy]' if prefix == 'lazy' else ''}: {body}" for (prefix, body), name in self._names.items()]


class Spelling:
    """How pieces are spelled in one vocabulary: markers are tokens where it has them, else text."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self.marker_ids = marker_ids

    def of(self, pieces: Sequence[Piece]) -> str:
        """`pieces` one behind the other, as a part of a rule."""
        return " ".join(map(self._piece, pieces))

    def text_at_begin(self, pieces: Sequence[Piece]) -> str:
        """What `pieces` begin with where that is text, "" where it is a token."""
        first = pieces[0]
        if isinstance(first, str):
            return first
        return first.name if isinstance(first, Marker) and first.name not in self.marker_ids else ""

    def _piece(self, piece: Piece) -> str:
        if isinstance(piece, str):
            return literal(piece)
        if isinstance(piece, Pattern):
            return f"/{piece.regex}/"
        if isinstance(piece, Maybe):
            return f"({self.of(piece.pieces)})?"
        token_id = self.marker_ids.get(piece.name)
        return literal(piece.name) if token_id is None else f"<[{token_id}]>"


def literal(text: str) -> str:
    """`text` in quotes."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A regular expression that fits `text` alone."""
    # Other characters must not be escaped.
    return inside_slashes(re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text))


def inside_slashes(regex: str) -> str:
    """`regex` as it stands between slashes: these escaped where they are not, line breaks spelled."""
    return re.sub(r"\\.|[/\n]", lambda match: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0]), regex,
                  flags=re.DOTALL)  # fmt: skip
