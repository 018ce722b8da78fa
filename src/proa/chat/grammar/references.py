"""Finds schemas that no finite text fits: references that lead in a circle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["has_finite_text", "resolver"]

# A round settles all that is not part of a circle; circles within circles take one more each.
_MAX_ROUNDS = 32

_Schema = Mapping[str, Any]


def has_finite_text(root: _Schema) -> bool:
    """Whether anything of finite length can fit `root`, as far as references, combinations and required parts say.

    Only local references are followed; others, and what is no schema, count as fitting. Linear in the schema.
    """
    resolve = resolver(root)
    order = _post_order(root, resolve)
    finite: set[int] = set()

    def fits(schema: Any) -> bool:
        return not isinstance(schema, Mapping) or id(schema) in finite

    for _ in range(_MAX_ROUNDS):
        before = len(finite)
        finite.update(id(schema) for schema in order if id(schema) not in finite and _is_finite(schema, resolve, fits))
        if id(root) in finite:
            return True
        if len(finite) == before:
            return False
    return True


def _is_finite(schema: _Schema, resolve: Callable[[Any], Any], fits: Callable[[Any], bool]) -> bool:
    if "$ref" in schema and not fits(resolve(schema["$ref"])):
        return False
    if not all(fits(part) for part in _list(schema.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _list(schema.get(key))
        if parts and not any(fits(part) for part in parts):
            return False
    return all(fits(part) for part in _needed(schema))


def _needed(schema: _Schema) -> Iterator[Any]:
    """Schemas of parts that every fitting value has."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    properties = schema.get("properties")
    if kinds == ["object"] and isinstance(properties, Mapping):
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name in properties:
                yield properties[name]
    least = schema.get("minItems")
    if kinds == ["array"] and isinstance(least, int) and least > 0:
        first = _list(schema.get("prefixItems"))
        yield from first[:least]
        if least > len(first):
            yield schema.get("items")


def _post_order(root: _Schema, resolve: Callable[[Any], Any]) -> list[_Schema]:
    """All schemas that `root`'s finiteness may depend on, what a schema depends on before it where that is possible."""
    order: list[_Schema] = []
    seen = {id(root)}
    stack: list[tuple[_Schema, Iterator[Any]]] = [(root, _dependencies(root, resolve))]
    while stack:
        schema, children = stack[-1]
        child = next((part for part in children if isinstance(part, Mapping) and id(part) not in seen), None)
        if child is None:
            order.append(schema)
            stack.pop()
        else:
            seen.add(id(child))
            stack.append((child, _dependencies(child, resolve)))
    return order


def _dependencies(schema: _Schema, resolve: Callable[[Any], Any]) -> Iterator[Any]:
    if "$ref" in schema:
        yield resolve(schema["$ref"])
    for key in ("allOf", "anyOf", "oneOf"):
        yield from _list(schema.get(key))
    yield from _needed(schema)


def resolver(root: _Schema) -> Callable[[Any], Any]:
    """What finds the schema that a local reference in `root` names."""

    def resolve(reference: Any) -> Any:
        """The schema a local reference names, None for any other one."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        value: Any = root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and len(key) < 9 and int(key) < len(value):
                value = value[int(key)]
            else:
                value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return resolve


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
