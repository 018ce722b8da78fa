"""Schemas of JSON that stands between tags: none of its texts may contain what ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proa.chat.grammar.rules import escaped

__all__ = ["NOTES", "guarded"]

_ANY, _TEXT = "proa.any", "proa.text"
_COMBINING = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
# Keywords that constrain nothing.
NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties")


def guarded(schema: Mapping[str, Any], tags: Sequence[str]) -> dict[str, Any]:
    """`schema` for values whose JSON does not contain one of `tags`, which begin with `<` and have no other one.

    Strings get patterns, and what the schema leaves open becomes a schema that says so of its strings and keys. An
    object with properties has no other ones, unless there is a schema for these: then their names stay unguarded.
    """
    if not tags:
        return dict(schema)
    guard = _Guard([_without(tag) for tag in tags])
    found = guard.node(schema)
    return {**found, "$defs": {**found.get("$defs", {}), **guard.definitions}}


class _Guard:
    def __init__(self, patterns: list[str]) -> None:
        self._pattern = patterns[0]
        self._more = [{"pattern": pattern} for pattern in patterns[1:]]
        self._any = {"$ref": f"#/$defs/{_ANY}"}
        text: dict[str, Any] = {"type": "string"}
        self._guard_string(text)
        self._text = {"$ref": f"#/$defs/{_TEXT}"}
        others = [{"type": ["null", "boolean", "number"]}, {"type": "array", "items": self._any}]
        self.definitions = {_TEXT: text, _ANY: {"anyOf": [*others, self._text, self.node({"type": "object"})]}}

    def node(self, schema: Any, *, is_open: bool = True) -> Any:
        """The schema guarded; `is_open` False: it stands beside one that says what it leaves open."""
        if schema is True:
            return self._any if is_open else True
        if not isinstance(schema, Mapping):
            return schema
        new = dict(schema)
        for key in _MAPS:
            if isinstance(parts := new.get(key), Mapping):
                new[key] = {name: self.node(part) for name, part in parts.items()}
        for key in _SINGLE:
            if key in new:
                new[key] = self.node(new[key])
        if isinstance(parts := new.get("prefixItems"), list):
            new["prefixItems"] = [self.node(part) for part in parts]
        keys = set(schema) - NOTES - {"$defs", "definitions"}
        is_own = is_open and not keys & {"enum", "const"} and not keys <= _COMBINING
        # What is intersected is guarded once: the engine does not see that two open schemas are the same.
        is_next_open = is_open and not is_own and "$ref" not in keys
        if isinstance(parts := new.get("allOf"), list):
            new["allOf"] = [self.node(part, is_open=is_next_open and not index) for index, part in enumerate(parts)]
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := new.get(key), list):
                new[key] = [self.node(part, is_open=is_next_open and "allOf" not in keys) for part in parts]
        if not keys:
            return {**new, **self._any} if is_open else new
        return self._guard(schema, new) if is_own else new

    def _guard(self, schema: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        named = schema.get("type")
        types = named if isinstance(named, list) else [named]
        if named == "string" and set(schema) - NOTES == {"type"}:
            return self._text
        if None in types or "string" in types:
            self._guard_string(new)
        if None in types or "object" in types:
            self._guard_keys(new)
        if (None in types or "array" in types) and "items" not in new:
            new["items"] = self._any
        return new

    def _guard_string(self, new: dict[str, Any]) -> None:
        more = list(self._more)
        if "pattern" in new:
            more.insert(0, {"pattern": self._pattern})
        else:
            new["pattern"] = self._pattern
        if more:
            new["allOf"] = [*new.get("allOf", []), *more]

    def _guard_keys(self, new: dict[str, Any]) -> None:
        extra = new.get("additionalProperties", self._any)
        if extra is False or "patternProperties" in new:
            return
        if not new.get("properties"):
            new["patternProperties"] = {self._pattern: extra}
            new["additionalProperties"] = False
        elif extra == self._any and not _COMBINING & set(new):
            # A pattern for other keys would be one for those declared too.
            required = new.get("required")
            names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            new["properties"] = {**new["properties"], **{n: self._any for n in names if n not in new["properties"]}}
            new["additionalProperties"] = False


def _without(tag: str) -> str:
    """A regular expression of all texts that do not contain `tag`.

    Behind each `<` comes what is not the rest of the tag, up to the next `<`.
    """
    rest = tag[1:]
    part = f"(?:[^{escaped(rest[-1])}<][^<]*)?"
    for character in reversed(rest[:-1]):
        part = f"(?:[^{escaped(character)}<][^<]*|{escaped(character)}{part})?"
    return f"^[^<]*(?:<{part})*$"
