"""YAML as plain values together with the line of every key. Only safe tags; a key may stand but once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from proa.gateway.problems import ConfigProblem, InvalidConfigError

__all__ = ["KeyPath", "YamlSource", "read_yaml"]

KeyPath = tuple[str | int, ...]
_MAX_DEPTH = 20
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
# What JSON has too: parameters become parts of request bodies.
_SCALARS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null")}
_NO_NUMBER = {".nan", ".inf", "+.inf", "-.inf"}


@dataclass(slots=True)
class YamlSource:
    """A document. `lines`: path of keys and indices -> line, counted from 1."""

    name: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: Sequence[str | int]) -> int:
        """Line of the nearest thing on the way to `path` that stands in the file."""
        found = tuple(path)
        while found and found not in self.lines:
            found = found[:-1]
        return self.lines.get(found, 1)


def read_yaml(text: str, name: str) -> YamlSource:
    """Parse one document.

    Raises:
        InvalidConfigError: no YAML, several documents, a key twice, a key that is no text.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        raise InvalidConfigError(name, [ConfigProblem(1, "", "YAML", str(error))]) from error
    try:
        node = loader.get_single_node()
        source = YamlSource(name, None)
        if node is not None:
            problems: list[ConfigProblem] = []
            _walk(node, (), source.lines, problems)
            if problems:
                raise InvalidConfigError(name, problems)
            source.value = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        got = getattr(error, "problem", None) or str(error)
        raise InvalidConfigError(name, [ConfigProblem(line, "", "YAML", str(got))]) from error
    except (ValueError, ArithmeticError, RecursionError) as error:
        # Numbers that only look like some, and nesting that no parser takes.
        raise InvalidConfigError(name, [ConfigProblem(1, "", "values of their kinds", str(error))]) from error
    finally:
        loader.dispose()
    return source


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[ConfigProblem]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(path) > _MAX_DEPTH:
        key = ".".join(map(str, path[:3])) + "..."
        problems.append(ConfigProblem(node.start_mark.line + 1, key, f"at most {_MAX_DEPTH} levels", "more"))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, problems)
    elif isinstance(node, yaml.MappingNode):
        for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            _walk_entry(key, value, path, lines, problems)
        _check_keys([key for key, _ in node.value if key.tag != _MERGE], path, problems)
    elif node.tag not in _SCALARS or (node.tag == f"{_TAG}float" and node.value.lower() in _NO_NUMBER):
        line = node.start_mark.line + 1
        problems.append(ConfigProblem(line, ".".join(map(str, path)), "a JSON value", node.value, "put it in quotes"))


def _walk_entry(
    key: yaml.Node, value: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[ConfigProblem]
) -> None:
    if key.tag == _MERGE:
        # What the mapping says itself comes later and goes before it.
        _walk(value, path, lines, problems)
        return
    inner = (*path, str(key.value))
    lines[inner] = key.start_mark.line + 1
    _walk(value, inner, lines, problems)


def _check_keys(keys: list[yaml.Node], path: KeyPath, problems: list[ConfigProblem]) -> None:
    seen: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        name = ".".join(map(str, (*path, key.value)))
        if key.tag != f"{_TAG}str":
            problems.append(ConfigProblem(line, name, "a text as key", str(key.value), "put it in quotes"))
        elif key.value in seen:
            problems.append(ConfigProblem(line, name, "a key once", f"again, after line {seen[key.value]}"))
        else:
            seen[key.value] = line
