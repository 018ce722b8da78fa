"""Finds markers in text that arrives in pieces, for models whose markers come as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from proa.chat.output.events import Piece

__all__ = ["MarkerLexer", "longest_suffix_in"]


def longest_suffix_in(text: str, beginnings: frozenset[str], longest: int) -> int:
    """Length of the longest suffix of `text` that is one of `beginnings` (none longer than `longest`), 0 if none."""
    for start in range(max(0, len(text) - longest), len(text)):
        if text[start:] in beginnings:
            return len(text) - start
    return 0


class MarkerLexer:
    """Cuts a text into markers and what stands between them, whatever the pieces it comes in. Linear in the text.

    Only the end of the text that may be the beginning of a marker is held back. No marker may be the beginning of
    another one.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        markers = frozenset(markers)
        self._pattern = re.compile("|".join(map(re.escape, sorted(markers))))
        self._first = tuple({marker[0] for marker in markers})
        self._beginnings = frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes, in order; neighbouring texts are joined."""
        if not self._held and not any(first in text for first in self._first):
            return [(text, False)] if text else []
        text = self._held + text
        pieces: list[Piece] = []
        begin = 0
        for match in self._pattern.finditer(text):
            if match.start() > begin:
                pieces.append((text[begin : match.start()], False))
            pieces.append((match[0], True))
            begin = match.end()
        keep = longest_suffix_in(text[max(begin, len(text) - self._longest) :], self._beginnings, self._longest)
        self._held = text[len(text) - keep :]
        if len(text) - keep > begin:
            pieces.append((text[begin : len(text) - keep], False))
        return pieces

    def finish(self) -> list[Piece]:
        """What is still held back: no marker came of it."""
        held, self._held = self._held, ""
        return [(held, False)] if held else []
