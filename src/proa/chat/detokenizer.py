"""Token ids to text as they arrive: whole characters only, stop strings cut out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Detokenizer", "StopStrings", "TokenBytes"]


class TokenBytes(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Incremental decoder of one sequence. O(bytes of the token) per token.

    An incomplete UTF-8 sequence is held back until it is complete or cannot become so (then U+FFFD stands for it).
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes, maybe none."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is still held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the stop string that ends first in a text that arrives in pieces, whatever the pieces.

    Text that may be the beginning of a stop string is held back. Of two that end at the same character the longer one
    counts. Each stop string has its Knuth-Morris-Pratt automaton, so a character costs O(number of stop strings).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_characters = {stop[0] for stop in self._stops}
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text that is certain to stand before any stop string. After a match `found` is set and nothing more comes.

        With `armed` False a stop string that ends within `text` does not count.
        """
        if self.found is not None:
            return ""
        if not self._held and not any(character in self._first_characters for character in text):
            return text
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._advance(text[position])
            if stop is not None and armed:
                self.found = stop
                self._held = ""
                return text[: position + 1 - len(stop)]
        keep = max(self._matched, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What is still held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Feed one character to every automaton; the longest stop string that ends with it."""
        ended = None
        for index, stop in enumerate(self._stops):
            failure = self._failures[index]
            length = self._matched[index]
            while length and stop[length] != character:
                length = failure[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                ended = ended or stop
                length = failure[length - 1]
            self._matched[index] = length
        return ended


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
