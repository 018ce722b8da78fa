"""Finds markers in text that arrives in pieces, for models whose markers come as plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proa.chat.output.events import Piece

__all__ = ["MarkerLexer", "Markers", "longest_suffix_in"]


def longest_suffix_in(text: str, beginnings: frozenset[str], longest: int) -> int:
    """Length of the longest suffix of `text` that is one of `beginnings` (none longer than `longest`), 0 if none."""
    for start in range(max(0, len(text) - longest), len(text)):
        if text[start:] in beginnings:
            return len(text) - start
    return 0


@dataclass(frozen=True, slots=True)
class Markers:
    """A set of markers to be found in text; none may be the beginning of another one.

    search: the first one from a position on. first: the characters they begin with.
    """

    search: Callable[[str, int], re.Match[str] | None]
    first: frozenset[str]
    _beginnings: frozenset[str]
    _longest: int  # of the beginnings

    @classmethod
    def of(cls, markers: Iterable[str]) -> Markers:
        """At least one."""
        markers = frozenset(markers)
        beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
        pattern = re.compile("|".join(map(re.escape, sorted(markers))))
        first = frozenset(marker[0] for marker in markers)
        return cls(pattern.search, first, beginnings, max(map(len, beginnings), default=0))

    def held(self, text: str, begin: int) -> int:
        """How many characters at the end of `text[begin:]` may be the beginning of a marker."""
        tail = text[max(begin, len(text) - self._longest) :]
        if self.first.isdisjoint(tail):
            return 0
        return longest_suffix_in(tail, self._beginnings, self._longest)


class MarkerLexer:
    """Cuts a text into markers and what stands between them, whatever the pieces it comes in. Linear in the text.

    Only the end of the text that may be the beginning of a marker is held back.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = Markers.of(markers)
        self._first = tuple(self._markers.first)
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes, in order; neighbouring texts are joined."""
        if not self._held and not any(first in text for first in self._first):
            return [(text, False)] if text else []
        text = self._held + text
        pieces: list[Piece] = []
        begin = 0
        while (match := self._markers.search(text, begin)) is not None:
            if match.start() > begin:
                pieces.append((text[begin : match.start()], False))
            pieces.append((match[0], True))
            begin = match.end()
        keep = self._markers.held(text, begin)
        self._held = text[len(text) - keep :]
        if len(text) - keep > begin:
            pieces.append((text[begin : len(text) - keep], False))
        return pieces

    def finish(self) -> list[Piece]:
        """What is still held back: no marker came of it."""
        held, self._held = self._held, ""
        return [(held, False)] if held else []
