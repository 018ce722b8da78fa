"""Tools of the Responses API as functions, and back: free-text tools and namespaces become functions of their own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from proa.chat.output.tools import parse_object
from proa.core.errors import UserError
from proa.server.chat_request import check_tool_names
from proa.server.messages import FunctionName

__all__ = ["ResponseTools", "ToolRef", "free_text_arguments", "free_text_of"]

_NAME: TypeAdapter[str] = TypeAdapter(FunctionName)
# The one property of a free-text tool's function.
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class ToolRef:
    """What a client knows a function as. `is_free_text`: a `custom` tool, which takes text and no JSON."""

    name: str
    namespace: str | None = None
    is_free_text: bool = False


class ResponseTools:
    """The tools of a request. Those that OpenAI's servers would run are left out: nobody would run them.

    Raises:
        UserError: a tool without a usable name, or two of one name.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self.declared: list[dict[str, Any]] = []
        self._refs: dict[str, ToolRef] = {}
        names: list[str] = []
        for index, tool in enumerate(tools):
            for namespace, entry, where in _entries(tool, f"tools.{index}"):
                name = flat_name(_name(entry, where), namespace)
                names.append(name)
                is_free_text = entry.get("type") == "custom"
                self._refs[name] = ToolRef(entry["name"], namespace, is_free_text)
                self.declared.append(_free_text_function(name, entry) if is_free_text else _function(name, entry))
        check_tool_names(names)

    def ref(self, name: str) -> ToolRef:
        """What the client knows the function `name` as; an undeclared one as itself."""
        return self._refs.get(name) or ToolRef(name)


def flat_name(name: str, namespace: Any) -> str:
    """The function's name for the model. A namespace of `mcp__server__` already ends as one that is to be joined."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return namespace + name if namespace.endswith(("_", ".", "/")) else f"{namespace}__{name}"


def free_text_arguments(text: str) -> str:
    """The arguments of a free-text tool's function."""
    return json.dumps({_INPUT: text}, ensure_ascii=False, separators=(",", ":"))


def free_text_of(arguments: str) -> str:
    """The text that a call of a free-text tool's function means; what is not in its form is taken as it is."""
    value = parse_object(arguments)
    texts = [] if value is None else [text for text in (value.get(_INPUT), *value.values()) if isinstance(text, str)]
    return texts[0] if texts else arguments


def _entries(tool: Mapping[str, Any], where: str) -> Iterable[tuple[str | None, Mapping[str, Any], str]]:
    """(namespace, function or custom tool, its place) of an entry of `tools`."""
    kind = tool.get("type")
    if kind in ("function", "custom"):
        yield None, tool, where
    elif kind == "namespace":
        members = tool.get("tools")
        for index, member in enumerate(members if isinstance(members, list) else ()):
            if isinstance(member, Mapping) and member.get("type") in ("function", "custom"):
                yield _name(tool, where), member, f"{where}.tools.{index}"


def _name(tool: Mapping[str, Any], where: str) -> str:
    try:
        return _NAME.validate_python(tool.get("name"), strict=True)
    except ValidationError:
        expected = "1 to 256 characters without blanks, <, > and |"
        raise UserError(f"{where}.name", expected, repr(tool.get("name"))[:100]) from None


def _function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name} | {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    parameters = tool.get("parameters")
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _free_text_function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    about = "The whole input of the tool, as plain text."
    form = tool.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        about += f" It must follow this {form.get('syntax')} grammar:\n{form.get('definition')}"
    schema = {"type": "object", "properties": {_INPUT: {"type": "string", "description": about}}, "required": [_INPUT]}
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
