"""POST /v1/responses: OpenAI's stateless request, translated to the form of every API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from proa.chat.dialect import ChatTurn
from proa.core.errors import UserError
from proa.server.chat_request import ChatRequest, ToolChoice, system_text
from proa.server.field_types import MAX_TOKEN_ID, Body, Flag, Integer, Name, Text, at_most
from proa.server.generation_request import MAX_MESSAGES, MAX_TOOLS, ChatBody
from proa.server.responses_items import messages_of
from proa.server.responses_tools import ResponseTools, flat_name

__all__ = ["ResponsesRequest"]

_MAX_INCLUDES = 32


class TextOptions(Body):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Name | None = None


class ReasoningOptions(Body):
    """How much the model thinks."""

    effort: Name | None = None
    summary: Name | None = None


class ResponsesRequest(ChatBody):
    """POST /v1/responses. Nothing is stored, whatever `store` says: the whole conversation comes every time."""

    PROMPT_FIELD: ClassVar[str] = "input"

    input: Annotated[Text | list[dict[str, Any]], at_most(MAX_MESSAGES)]
    instructions: Text | None = None
    tools: Annotated[list[dict[str, Any]] | None, at_most(MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Name] | None, at_most(_MAX_INCLUDES)] = None
    metadata: dict[str, Any] | None = None
    previous_response_id: Name | None = None
    conversation: Any = None
    prompt: Any = None
    background: Flag | None = None

    @model_validator(mode="after")
    def _check_stateless(self) -> Self:
        fix = "send the whole conversation as input"
        for field in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, field):
                raise UserError(field, "none: this server keeps no responses", "one", fix, code="unsupported_parameter")
        if (self.n or 1) > 1:
            raise UserError("n", "1", self.n)
        if not self.input:
            raise UserError("input", "text or items", "none")
        return self

    def chat(self) -> ChatRequest:
        """See ChatBody."""
        tools = ResponseTools(self.tools or ())
        choice = self._choice
        effort = self.reasoning.effort if self.reasoning is not None else None
        return ChatRequest(
            turn=ChatTurn(
                messages=self._messages(),
                tools=tools.declared,
                no_calls=choice.mode == "none",
                thinking=False if effort == "none" else None,
                reasoning_effort=effort,
            ),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self._response_format,
            max_new_tokens=self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens,
        )

    @property
    def wants_sealed_reasoning(self) -> bool:
        """Whether reasoning is to come as `encrypted_content` too."""
        return "reasoning.encrypted_content" in (self.include or ())

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)
        if self.instructions and (text := system_text(self.instructions)):
            messages.insert(0, {"role": "system", "content": text})
        if not messages:
            raise UserError("input", "a message", "none")
        return messages

    @property
    def _choice(self) -> ToolChoice:
        """What tool_choice means."""
        choice = self.tool_choice
        if choice in (None, "auto"):
            return ToolChoice()
        if choice in ("none", "required"):
            return ToolChoice("none" if choice == "none" else "required")
        if isinstance(choice, dict):
            if choice.get("type") in ("function", "custom"):
                return ToolChoice("required", _flat(choice))
            if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
                names = [_flat(tool) for tool in choice["tools"] if isinstance(tool, dict)]
                return ToolChoice.of_allowed(choice.get("mode"), names)
        raise UserError("tool_choice", "none, auto, required, a function or allowed_tools", str(choice)[:100])

    @property
    def _response_format(self) -> dict[str, Any] | None:
        """Chat completions have the members of a json_schema format under a key of its own."""
        form = self.text.format if self.text is not None else None
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def _flat(choice: dict[str, Any]) -> str:
    return flat_name(str(choice.get("name")), choice.get("namespace"))
