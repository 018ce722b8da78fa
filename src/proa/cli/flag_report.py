"""What became of each flag that was given, told once the engine is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proa.cli import console
from proa.cli.flag import Flag
from proa.cli.flags import FLAGS
from proa.ipc.messages import Ready

__all__ = ["FlagReport"]

_LONGEST_DOC = 80


class FlagReport:
    """Rows of flag, value and what that came to.

    The engine says it where it is more than the value (`Ready.info`); else the flag's own description does.
    """

    def __init__(self, values: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> None:
        """`values` by flag name, None where one was not given.

        notes: of a command line of SGLang, whose spellings are then shown: what is done instead, by flag.
        """
        self._given = {flag: values[flag.name] for flag in FLAGS if values.get(flag.name) is not None}
        self._notes = notes
        self._is_shown = False

    def rows(self, info: Mapping[str, str]) -> list[tuple[str, str, str]]:
        """In the order of the tables of flags, those of SGLang alone last."""
        notes = dict(self._notes or {})
        rows = []
        for flag, value in self._given.items():
            name = flag.name if self._notes is None or not flag.sglang else flag.sglang[0]
            effect = notes.pop(name, None) or info.get(flag.field) or info.get(flag.row) or _in_short(flag.doc)
            rows.append((name, _shown(flag, value), effect))
        return rows + [(name, "", note) for name, note in notes.items()]

    def show(self, ready: Ready) -> None:
        """Print them, of the first engine only."""
        rows = [] if self._is_shown else self.rows(ready.info)
        self._is_shown = True
        names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        for name, value, effect in rows:
            line = f"  {name:<{names}}  {value:<{values}}  {effect}"
            console.err.print(line, markup=False, soft_wrap=True)


def _in_short(doc: str) -> str:
    """Without the values that it lists."""
    return doc if len(doc) <= _LONGEST_DOC else doc.partition(": ")[0]


def _shown(flag: Flag, value: Any) -> str:
    if flag.name == "--api-key":
        return "***"  # logs are kept
    return "" if flag.kind is bool else str(value)
