"""The lists, dicts and tuples that a template makes: how long they are written out, and which may still grow.

A template may put a list into another one twice, that one into a third twice, and so on: thirty steps make something
that cannot be written down. So every container counts what it holds, each time it holds it. What is inside another one
no longer changes, lest its count be wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

__all__ = ["LIST_METHODS", "PlainNamespace", "TemplateLists"]

LIST_METHODS = frozenset({"append", "extend", "insert", "pop"})
_SCALAR_CHARACTERS = 8


class PlainNamespace(Namespace):
    """`namespace()`, which does not write out what it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


class TemplateLists:
    """The containers of one rendering. check: raises for a number of characters that is too large."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self._check = check
        # By identity, with the object, so that no other one gets its identity.
        self._inside: dict[int, tuple[int, Any]] = {}
        self._grown: dict[int, tuple[int, Any]] = {}

    def made(self, value: Any) -> Any:
        """`value`, which a template made; the parts of a container are inside one from here on."""
        if (parts := _parts(value)) is not None:
            self._check(self._sum(parts))
        return value

    def change(self, target: list[Any], method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of LIST_METHODS of `target`; the argument of `extend` is a list.

        Raises:
            SecurityError: a list inside another one, or into itself.
        """
        if id(target) in self._inside:
            raise SecurityError("a list inside another one is changed")
        added = [] if method == "pop" else args[-1] if method == "extend" else args[-1:]
        if any(item is target for item in added):
            raise SecurityError("a list is put into itself")
        known = self._grown.get(id(target))
        size = (self._sum(target) if known is None else known[0]) + self._sum(added)
        self._check(size)
        self._grown[id(target)] = (size, target)
        return getattr(target, method)(*args)

    def _sum(self, parts: Iterable[Any]) -> int:
        return sum(map(self._size, parts))

    def _size(self, value: Any) -> int:
        """About how many characters `value` is written with."""
        if isinstance(value, str):
            return len(value)
        parts = _parts(value)
        if parts is None:
            return _SCALAR_CHARACTERS
        if (known := self._inside.get(id(value))) is None:
            # Known before its parts are: one that holds itself ends here.
            self._inside[id(value)] = (0, value)
            size = _SCALAR_CHARACTERS + self._sum(parts)
            self._check(size)
            self._inside[id(value)] = known = (size, value)
        return known[0]


def _parts(value: Any) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list | tuple | set | frozenset) else None
