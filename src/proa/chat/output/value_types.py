"""What JSON types the schema of a tool allows a parameter to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ALL_TYPES", "parameter_types", "schema_types"]

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# Schemas may refer to themselves; more of one is not looked at.
_MAX_NODES = 200


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that `schema`, an object's, allows its property `name`; all of them when it does not say.

    `$ref` into the schema itself, `anyOf`, `oneOf`, `allOf`, `enum`, `const` and `nullable` are understood. Whatever is
    malformed allows everything.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        extra = schema.get("additionalProperties")
        return _Reader(schema).types(extra) if isinstance(extra, Mapping) else ALL_TYPES
    return _Reader(schema).types(properties[name])


def schema_types(root: Mapping[str, Any], schema: Any) -> frozenset[str]:
    """The JSON types that `schema`, a part of `root`, allows."""
    return _Reader(root).types(schema)


class _Reader:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._nodes_left = _MAX_NODES

    def types(self, schema: Any) -> frozenset[str]:
        self._nodes_left -= 1
        if not isinstance(schema, Mapping) or self._nodes_left < 0:
            return ALL_TYPES
        types = self._own_types(schema)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list) and branches:
                types &= frozenset[str]().union(*[self.types(branch) for branch in branches])
        if isinstance(branches := schema.get("allOf"), list):
            for branch in branches:
                types &= self.types(branch)
        if isinstance(reference := schema.get("$ref"), str):
            types &= self.types(self._target(reference))
        if schema.get("nullable") is True:
            types |= {"null"}
        return types or ALL_TYPES

    def _own_types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        named = schema.get("type")
        names = named if isinstance(named, list) else [named]
        types = ALL_TYPES.intersection(name for name in names if isinstance(name, str)) or ALL_TYPES
        if "number" in types:
            types |= {"integer"}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            types &= frozenset().union(*map(_types_of, values))
        return types

    def _target(self, reference: str) -> Any:
        """What `#/$defs/name` points to; None for anything else."""
        if not reference.startswith("#"):
            return None
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return target


def _types_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if isinstance(value, int) else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}
