"""Messages and tools of a conversation, as OpenAI's clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, StringConstraints, field_validator, model_validator

from proa.server.chat_request import system_text
from proa.server.content import text_of
from proa.server.field_types import Body, Name, Text, at_most

__all__ = ["MAX_PARTS", "FunctionName", "Message", "Thinking", "Tool"]

MAX_PARTS = 1000

# Names of functions are what may stand in a call's id: no blanks, no brackets of markers.
FunctionName = Annotated[str, StringConstraints(pattern=r"^[^\s<>|\x00-\x20\x7f]{1,256}$")]

_THOUGHTS = ("thinking", "redacted_thinking")


class FunctionCall(Body):
    """The function of a call in the history."""

    name: Annotated[Text, StringConstraints(max_length=1024)]
    arguments: Any = None

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("text without NUL characters")
        return value


class ToolCall(Body):
    """A call in the history."""

    id: Name | None = None
    type: Name = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Text | list[dict[str, Any]] | None, at_most(MAX_PARTS)] = None
    name: Annotated[Text, StringConstraints(max_length=1024)] | None = None
    tool_calls: Annotated[list[ToolCall] | None, at_most(MAX_PARTS)] = None
    tool_call_id: Annotated[Text, StringConstraints(max_length=1024)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("a message with content")
        return self

    @property
    def _thought(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def as_openai(self, where: str) -> dict[str, Any]:
        """The message with its content as text, never missing.

        Raises:
            UserError: a content part that is no text, named by `where`.
        """
        message = self.model_dump(exclude_none=True, exclude={"content"})
        content, thought = self.content, self._thought
        if isinstance(content, list) and self.role == "assistant":
            if thought is None and (thoughts := [str(part.get("thinking") or "") for part in _thinking(content)]):
                thought = "".join(thoughts)
            content = [part for part in content if part.get("type") not in _THOUGHTS]
        text = text_of(content, f"{where}.content")
        message["content"] = text
        if self.role in ("system", "developer"):
            # Models know the one; the other is OpenAI's newer name for it.
            message.update(role="system", content=system_text(text))
        if thought is not None:
            message["reasoning"] = message["reasoning_content"] = thought
        return message


def _thinking(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for part in parts if part.get("type") == "thinking"]


class ToolFunction(Body):
    """A function a model may call."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """An entry of `tools`; those without a function are kept for the prompt and never called."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: Name = "function"
    function: ToolFunction | None = None

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if self.type == "function" and self.function is None:
            raise ValueError("a function with its name")
        return self

    def as_openai(self) -> dict[str, Any]:
        """The tool as it was sent."""
        return self.model_dump(exclude_unset=True) | {"type": self.type}


class Thinking(Body):
    """Moonshot's and Anthropic's switch. `keep`: with "all" the reasoning of answered turns stays in the prompt."""

    type: Literal["enabled", "disabled", "adaptive"]
    keep: Name | None = None
