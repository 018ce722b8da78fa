"""Messages and tools of a conversation, as OpenAI's clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, StringConstraints, model_validator

from proa.server.field_types import Body, Name, Text, at_most

__all__ = ["Message", "Thinking", "Tool"]

MAX_PARTS = 1000


class TextPart(Body):
    """A part of a message's content; only text is there yet."""

    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    """The function of a call in the history."""

    name: Annotated[Text, StringConstraints(max_length=1024)]
    arguments: Text = ""


class ToolCall(Body):
    """A call in the history."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Text | list[TextPart] | None, at_most(MAX_PARTS)] = None
    name: Annotated[Text, StringConstraints(max_length=1024)] | None = None
    tool_calls: Annotated[list[ToolCall] | None, at_most(MAX_PARTS)] = None
    tool_call_id: Annotated[Text, StringConstraints(max_length=1024)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self._thought)):
            raise ValueError("a message with content")
        return self

    @property
    def _thought(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def as_openai(self) -> dict[str, Any]:
        """The message as an OpenAI client sends it, arguments of calls as text; content is never missing."""
        message = self.model_dump(exclude_none=True)
        message.setdefault("content", "")
        if (thought := self._thought) is not None:
            message["reasoning"] = message["reasoning_content"] = thought
        return message


class ToolFunction(Body):
    """A function a model may call. Names are what may stand in a call's id: no blanks, no brackets of markers."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, StringConstraints(pattern=r"^[^\s<>|\x00-\x20]{1,256}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """An entry of `tools`; those of other types than function are kept for the prompt and never called."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: Name = "function"
    function: ToolFunction | None = None

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if self.type == "function" and self.function is None:
            raise ValueError("a function with its name")
        return self


class Thinking(Body):
    """Moonshot's and Anthropic's switch."""

    type: Literal["enabled", "disabled", "adaptive"]
