"""The tools a request declares, and which of them a call without a usable name means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from proa.chat.output.value_types import ALL_TYPES, parameter_types

__all__ = ["BLANKS", "DeclaredTools", "parse_json", "parse_object", "unwrap_object"]

# What counts as blank in a model's output; other Unicode spaces are text.
BLANKS = " \t\r\n"
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    properties: frozenset[str]
    required: frozenset[str]
    is_open: bool  # takes keys that are not properties
    schema: Mapping[str, Any]

    def takes(self, keys: frozenset[str]) -> bool:
        return self.required <= keys and (self.is_open or keys <= self.properties)

    def score(self, keys: frozenset[str]) -> int:
        return len(keys & self.properties) - len(keys - self.properties)


class DeclaredTools:
    """The functions of a request's `tools` (OpenAI's form; entries of other types are not counted)."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None) -> None:
        functions = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), Mapping)]
        self._tools = [_read(function) for function in functions]
        self._by_name = {tool.name: tool for tool in self._tools}
        self.names = frozenset(self._by_name)

    def declares(self, name: str, parameter: str) -> bool:
        """Whether the tool `name` has a property of this very name."""
        tool = self._by_name.get(name)
        return tool is not None and parameter in tool.properties

    def value_types(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that `parameter` of the tool `name` may have; all of them when that is not declared."""
        tool = self._by_name.get(name)
        return ALL_TYPES if tool is None else parameter_types(tool.schema, parameter)

    def infer(self, arguments: str) -> str | None:
        """The one tool that a call with these arguments must mean, else None.

        A single tool is meant whatever the arguments. Of several, the only one whose required properties are all there
        and that takes every key; else the only one with the highest score (keys it knows less keys it does not), when
        that is not negative and it knows a key at all.
        """
        if len(self._tools) <= 1:
            return self._tools[0].name if self._tools else None
        value = parse_object(arguments)
        if value is None:
            return None
        keys = frozenset(value)
        candidates = [tool for tool in self._tools if tool.takes(keys)]
        if len(candidates) == 1:
            return candidates[0].name
        best = max(tool.score(keys) for tool in self._tools)
        winners = [tool for tool in self._tools if tool.score(keys) == best]
        if len(winners) == 1 and best >= 0 and keys & winners[0].properties:
            return winners[0].name
        return None


def parse_object(text: str) -> dict[str, Any] | None:
    """`text` as a JSON object, else None."""
    value = parse_json(text)
    return value if isinstance(value, dict) else None


def unwrap_object(text: str) -> str | None:
    """The JSON object that the JSON string `text` holds, as the text it holds it in; None when it holds none."""
    value = parse_json(text)
    if not isinstance(value, str) or parse_object(value) is None:
        return None
    return value.strip(BLANKS)


def parse_json(text: str) -> Any:
    """`text` as JSON, None when it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _read(function: Mapping[str, Any]) -> _Tool:
    schema = function.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    required = schema.get("required")
    extra = schema.get("additionalProperties")
    return _Tool(
        name=str(function.get("name", "")),
        properties=frozenset(properties) if isinstance(properties, Mapping) else _NONE,
        required=frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else _NONE,
        is_open=extra is True or isinstance(extra, Mapping),
        schema=schema,
    )
