"""Token ids of the texts of recent prompts, so that a conversation that grows is not tokenized again from its start."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["EncodedTexts"]

# Characters of all texts that are kept: some ten long conversations; about 4 bytes of ids for 4 characters.
MAX_CHARACTERS = 8_000_000
# What an entry takes beside its text and ids, in characters.
_ENTRY = 100


class EncodedTexts:
    """Remembers what `encode` made of a text, the least recently used texts being forgotten first. Thread-safe.

    Args:
        encode: the ids of a text, the same at each call.
        max_characters: of all texts together; a text over a quarter of it is not kept.
    """

    def __init__(self, encode: Callable[[str], list[int]], max_characters: int = MAX_CHARACTERS) -> None:
        self._encode = encode
        self._max_characters = max_characters
        self._characters = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def characters(self) -> int:
        """What the texts that are remembered count, each a little more than its length."""
        return self._characters

    def encode(self, text: str) -> Sequence[int]:
        """The ids of `text`; not to be changed."""
        with self._lock:
            known = self._ids.get(text)
            if known is not None:
                self._ids.move_to_end(text)
                return known
        ids = self._encode(text)
        if len(text) > self._max_characters // 4:
            return ids
        with self._lock:
            if text not in self._ids:  # else another thread was faster
                self._ids[text] = array("i", ids)
                self._characters += len(text) + _ENTRY
            while self._characters > self._max_characters:
                forgotten, _ = self._ids.popitem(last=False)
                self._characters -= len(forgotten) + _ENTRY
        return ids
