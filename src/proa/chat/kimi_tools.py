"""Tool declarations in the TypeScript-like form that Kimi K2.5 and later were trained on.

Every rule is that of the published encoder as its outputs show it, quirks included: a prompt that differs from the
ones in training makes worse calls. A schema outside the form has no declaration: then the whole list is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["declare_tools", "sorted_json"]

_INDENT = "  "
_SIMPLE = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "array": "Array<any>",
    "object": "{}",
}
# The bounds that become comments, and the type of a value in an `enum`.
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_ENUM_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "integer": (int, float)}


class _UnsupportedError(Exception):
    """A schema that has no declaration."""


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declarations of the functions among `tools` (OpenAI's form), None when one of them has no such form."""
    try:
        functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
        declared = "".join(f"{_declare(_sorted(function))}\n" for function in functions)
    except (_UnsupportedError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}}}\n"


def sorted_json(value: Any) -> str:
    """`value` as compact JSON with all keys sorted, as Kimi's prompts hold what has no declaration."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value


def _declare(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    definitions = schema.get("$defs") or {}
    writer = _Writer(definitions)
    body = writer.object(schema, "")
    lines: list[str] = []
    for name, definition in definitions.items():
        lines += writer.comments(definition, "")
        lines.append(f"interface {name} {writer.type(definition, '')}")
    if writer.refers_to_root:
        lines.insert(0, f"interface parameters {writer.object(schema, '', is_root_interface=True)}")
        body = "parameters"
    lines += _comment_lines(function.get("description") or "", "")
    lines.append(f"type {function['name']} = (_: {body}) => any;")
    return "\n".join(lines)


class _Writer:
    """Writes the types of one function's schema."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self.refers_to_root = False

    def object(self, schema: Mapping[str, Any], indent: str, *, is_root_interface: bool = False) -> str:
        """The members of an object schema: required ones first, but in the interface of the root by name alone."""
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        members: list[list[str]] = []
        inner = indent + _INDENT
        for name in sorted(properties, key=lambda name: (name not in required and not is_root_interface, name)):
            mark = "" if name in required else "?"
            member = f"{inner}{name}{mark}: {self.type(properties[name], inner)}"
            members.append([*self.comments(properties[name], inner), member])
        if not is_root_interface and (rest := schema.get("additionalProperties")) is not None:
            members.append([f"{inner}[k: string]: {self._rest(rest, inner)}"])
        if not members:
            return "{}"
        body = ",\n".join("\n".join(lines) for lines in members)
        return f"{{\n{body}\n{indent}}}"

    def type(self, schema: Any, indent: str) -> str:
        """The type of a value."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not schema:
            return "any"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(option, indent) for option in schema["anyOf"])
        kind = schema.get("type")
        if "enum" in schema:
            return _enum(schema["enum"], kind)
        if isinstance(kind, list):
            return " | ".join(_SIMPLE[name] for name in kind)
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if kind in _SIMPLE:
            return _SIMPLE[kind]
        raise _UnsupportedError

    def comments(self, schema: Any, indent: str) -> list[str]:
        """Description, bounds and default of a value, as comment lines."""
        if not isinstance(schema, Mapping):
            return []
        lines = list(_comment_lines(schema.get("description") or "", indent))
        kind = schema.get("type")
        bounds = _BOUNDS.get(kind, ()) if isinstance(kind, str) else ()
        if present := [f"{bound}: {schema[bound]}" for bound in bounds if schema.get(bound) is not None]:
            lines.append(f"{indent}// {', '.join(present)}")
        if schema.get("default") is not None:
            lines.append(f"{indent}// Default: {_literal(schema['default'])}")
        return lines

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items")
        if items is None:
            return "Array<any>"
        comments = self.comments(items, indent + _INDENT)
        if not comments:
            return f"Array<{self.type(items, indent)}>"
        inner = indent + _INDENT
        return "\n".join(["Array<", *comments, f"{inner}{self.type(items, inner)}", f"{indent}>"])

    def _rest(self, rest: Any, indent: str) -> str:
        if isinstance(rest, bool):
            return "any" if rest else "never"
        return self.type(rest, indent)

    def _reference(self, target: Any) -> str:
        if target == "#":
            self.refers_to_root = True
            return "parameters"
        name = str(target).removeprefix("#/$defs/")
        if name == target or name not in self._definitions:
            raise _UnsupportedError
        return name


def _comment_lines(text: str, indent: str) -> Iterator[str]:
    # An empty line stays empty.
    if text:
        for line in text.split("\n"):
            yield f"{indent}// {line}" if line else ""


def _enum(values: Sequence[Any], kind: Any) -> str:
    types = _ENUM_TYPES.get(kind, ()) if isinstance(kind, str) else ()
    if types and not all(isinstance(value, types) and not isinstance(value, bool) for value in values):
        raise _UnsupportedError
    return " | ".join(_literal(value) for value in values)


def _literal(value: Any) -> str:
    """Text and containers as JSON, other values as Python prints them."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | list | dict) else str(value)
