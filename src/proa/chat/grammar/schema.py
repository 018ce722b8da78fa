"""JSON schemas of clients, prepared for the grammar engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from proa.chat.grammar.references import has_finite_text
from proa.core.errors import UserError

__all__ = ["ANY_OBJECT", "MAX_SCHEMA_CHARACTERS", "check_schema", "schema_rule"]

MAX_SCHEMA_CHARACTERS = 256 * 1024
# The engine's JSON reader gives up at 128.
_MAX_DEPTH = 100
# No answer is as long; larger bounds do not fit the engine's counters.
_LARGEST_BOUND = 2**31 - 1
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Enough for indented JSON. Without a bound a model can write blanks for ever.
_WHITESPACE = r"[ \t\r\n]{1,64}"

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def schema_rule(schema: Any, where: str, *, strict: bool) -> str:
    """`schema` as the `%json` part of a grammar.

    strict: a keyword the engine does not have is an error when the grammar is compiled; else it is ignored.

    Raises:
        UserError: no schema, one too large or too deep, or one that nothing fits.
    """
    if schema is True:
        schema = {}
    check_schema(schema, where)
    prepared = {key: value for key, value in _prepared(schema).items() if key not in {"$id", "$schema"}}
    prepared["x-guidance"] = {"whitespace_pattern": _WHITESPACE, "lenient": not strict, "coerce_one_of": True}
    text = json.dumps(prepared, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise UserError(where, f"a schema of at most {MAX_SCHEMA_CHARACTERS} characters", len(text))
    return f"%json {text}"


def check_schema(schema: Any, where: str) -> None:
    """Raise UserError for what is no schema, too deep, or fits nothing."""
    if not isinstance(schema, Mapping):
        raise UserError(where, "a JSON schema (an object)", type(schema).__name__)
    _check_depth(schema, where)
    if not has_finite_text(schema):
        raise UserError(where, "a schema that something can fit", "references that lead in a circle")


def _check_depth(schema: Any, where: str) -> None:
    level = [schema]
    for _ in range(_MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise UserError(where, f"a schema of at most {_MAX_DEPTH} levels", "a deeper one")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _prepared(value: Any) -> Any:
    """A copy with bounds the engine can count to."""
    if isinstance(value, list):
        return [_prepared(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _bounded(item) if key in _BOUNDS else _prepared(item) for key, item in value.items()}


def _bounded(value: Any) -> Any:
    """A length; other things under such a name (a property called `minLength`) stay."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _prepared(value)
    return min(value, _LARGEST_BOUND)
