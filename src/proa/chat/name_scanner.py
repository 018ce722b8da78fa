"""Finds any of a set of names in text, in time that does not depend on how many names there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["NameScanner"]

# A search keeps the interpreter's lock; between windows other threads get their turn.
_WINDOW = 64 * 1024
_END = ""


class NameScanner:
    """Replaces names in text; where several begin at the same character the longest counts."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name for name in names if name)
        self._longest = max(map(len, self._names), default=0)
        # `(?!)` matches nothing.
        self._pattern = re.compile(_alternatives(_trie(self._names)) if self._names else "(?!)")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def replace(self, text: str, spell: Callable[[str], str]) -> str:
        """`text` with every name replaced by `spell(name)`."""
        pieces: list[str] = []
        done = position = 0
        while position < len(text):
            window_end = position + _WINDOW
            # A name that begins inside the window is seen whole.
            match = self._pattern.search(text, position, window_end + self._longest)
            if match is None or match.start() >= window_end:
                position = window_end
                continue
            pieces += [text[done : match.start()], spell(match[0])]
            done = position = match.end()
        pieces.append(text[done:])
        return "".join(pieces)


def _trie(names: Iterable[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name in sorted(names):
        node = root
        for character in name:
            node = node.setdefault(character, {})
        node[_END] = {}
    return root


def _alternatives(node: dict[str, Any]) -> str:
    """A pattern for what may follow; at most one branch is viable for each next character."""
    branches = [_branch(character, child) for character, child in node.items() if character != _END]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and _END not in node else f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if _END in node else pattern


def _branch(character: str, child: dict[str, Any]) -> str:
    # A run without branches is one literal: the pattern's depth stays that of the trie's forks.
    literal = character
    while len(child) == 1 and _END not in child:
        ((character, child),) = child.items()
        literal += character
    return re.escape(literal) + _alternatives(child)
