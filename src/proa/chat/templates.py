"""A checkpoint's chat template: messages to the text of a prompt."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import msgspec

from proa.chat.control_tokens import ControlTokens
from proa.chat.kimi_tools import declare_tools, sorted_json
from proa.chat.sandbox import RenderBudget, TemplateSandbox
from proa.core.errors import CheckpointError, ProaError, UserError

__all__ = ["ChatTemplate", "read_json", "read_template_source", "special_token_names"]

logger = logging.getLogger("proa.chat")

_SECONDS = 5.0
_STEPS = 1_000_000
_MAX_CHARACTERS = 64 * 1024 * 1024
# tokenizer_config.json entries a template may name, as in transformers.
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The template's own variables; a request may not replace them.
_RESERVED = frozenset({"messages", "tools", "tools_ts_str", "documents", "add_generation_prompt", *_SPECIAL_TOKEN_KEYS})


def read_template_source(model_path: Path, override: Path | None = None) -> str | None:
    """The template: `override`, else chat_template.jinja, else the entry of tokenizer_config.json, else None.

    Raises:
        CheckpointError: an unreadable file.
    """
    if override is not None:
        return _read_text(override)
    if (file := model_path / "chat_template.jinja").exists():
        return _read_text(file)
    source = read_json(model_path / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def special_token_names(model_path: Path) -> dict[str, str]:
    """`bos_token` and its like of tokenizer_config.json, as template variables."""
    config = read_json(model_path / "tokenizer_config.json")
    names = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[key] = value
    return names


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty when there is no such file.

    Raises:
        CheckpointError: unreadable, or no JSON object.
    """
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(path.name, "a readable JSON file", str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(path.name, "a JSON object", type(value).__name__)
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError("chat template", "a readable UTF-8 file", str(error)) from error


class ChatTemplate:
    """One compiled template. Thread-safe.

    Args:
        source: jinja2 text.
        special_tokens: variables like `bos_token`.
        control: marks user text, see ControlTokens.
    """

    def __init__(
        self,
        source: str,
        control: ControlTokens,
        *,
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = _SECONDS,
        max_characters: int = _MAX_CHARACTERS,
    ) -> None:
        self.source = source
        self._sandbox = TemplateSandbox()
        self._control = control
        self._special_tokens = dict(special_tokens or {})
        self._seconds = seconds
        self._max_characters = max_characters
        self._knows_developer = "developer" in source
        self._knows_typescript = "tools_ts_str" in source
        try:
            self._template = self._sandbox.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError("chat template", "a jinja2 template", str(error)) from error
        # What the template reads of its context.
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(self._sandbox.parse(source))) - _RESERVED
        self.shows_tools = "tools" in source
        self._renders_parts = self._probe_parts()
        self.takes_text_arguments = self._probe_arguments()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt with user text marked, for `Tokenizer.encode_rendered`.

        Args:
            messages: OpenAI messages; content is text or a list of text parts, arguments of calls are text with
                `takes_text_arguments`, else objects.
            tools: OpenAI's.
            continue_final_message: end the prompt inside the last message instead of after it.
            variables: further template variables of the request (`enable_thinking`).

        Raises:
            UserError: the template refuses the messages, or a budget is spent.
        """
        if reserved := sorted(_RESERVED & set(variables or {})):
            raise UserError("chat_template_kwargs", "no variable the server sets", ", ".join(reserved))
        prepared = [self._prepare(message) for message in messages]
        tag = ""
        if continue_final_message:
            # Digits survive every filter, and the template's trimming shows as blanks missing before the tag.
            tag = "".join(secrets.choice("0123456789") for _ in range(40)) + " "
            _append_to_content(prepared[-1], tag)
        text = self._render(
            prepared,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools),
            variables=variables or {},
        )
        return _cut_at_tag(text, tag) if tag else text

    def _render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
    ) -> str:
        budget = RenderBudget(seconds=self._seconds, steps=_STEPS, characters=self._max_characters)
        values = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **self._tool_variables(tools or []),
            **self._control.mark(dict(variables)),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._sandbox.render(self._template, values, budget)

    def _tool_variables(self, tools: list[Mapping[str, Any]]) -> dict[str, Any]:
        if not tools:
            return {}
        if not self._knows_typescript:
            return {"tools": self._control.mark([dict(tool) for tool in tools])}
        # Kimi's own code prepares these: sorted, and declared in TypeScript where they can be.
        variables = {"tools": self._control.mark(msgspec.json.decode(sorted_json(tools)))}
        if (declared := declare_tools(tools)) is not None:
            variables["tools_ts_str"] = self._control.mark(declared)
        return variables

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message["role"]
        prepared: dict[str, Any] = {
            key: self._control.mark(value, assistant=role == "assistant")
            for key, value in message.items()
            if key != "role"
        }
        prepared["role"] = "system" if role == "developer" and not self._knows_developer else role
        if isinstance(prepared.get("content"), list) and not self._renders_parts:
            prepared["content"] = "\n".join(part["text"] for part in prepared["content"])
        return prepared

    def _probe_parts(self) -> bool:
        """Whether the template renders a list of text parts as their text. Otherwise parts are joined before."""
        probe = "probe" + secrets.token_hex(8)
        messages = [{"role": "user", "content": [{"type": "text", "text": probe}]}]
        try:
            text = self._render(messages, add_generation_prompt=False, variables={})
        except ProaError as error:
            logger.debug("the chat template takes no content parts: %s", error)
            return False
        return probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text

    def _probe_arguments(self) -> bool:
        """Whether arguments of calls are given as text, which the template then writes as it is.

        Templates that write parameters one by one need objects; so do those that would quote a text once more.
        """
        probe = "probe" + secrets.token_hex(8)
        text = f'{{"{probe}":1}}'
        of_object, of_text = self._render_call({probe: 1}), self._render_call(text)
        return text in of_text and (not of_object or any(f"{quote}{probe}{quote}" in of_object for quote in "'\""))

    def _render_call(self, arguments: str | dict[str, Any], call_id: str = "0", name: str = "f") -> str:
        """A conversation with a call that has these arguments, empty where that fails."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return self._render(messages, add_generation_prompt=False, variables={})
        except ProaError:
            return ""

    def text_of_call(self, call_id: str, name: str, arguments: dict[str, Any]) -> str:
        """How the template writes a short conversation that ends with a call; empty where it cannot."""
        given = json.dumps(arguments) if self.takes_text_arguments else arguments
        text = self._control.unmark(self._render_call(given, call_id, name))
        for token in self._special_tokens.values():
            text = text.replace(token, "")
        return text


def _append_to_content(message: dict[str, Any], tag: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + tag
    elif isinstance(content, list) and content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + tag}
    else:
        raise UserError("continue_final_message", "a last message with text", "none")


def _cut_at_tag(text: str, tag: str) -> str:
    position = text.rfind(tag.rstrip())
    if position < 0:
        raise UserError(
            "continue_final_message", "a chat template that renders the last message as it is", "another text"
        )
    if text[position : position + len(tag)] == tag:
        return text[:position]
    return text[:position].rstrip()
