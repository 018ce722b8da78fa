"""Request bodies of the OpenAI-compatible routes: types, ranges and limits.

Numbers are strict (`true` and `"1"` are no numbers, NaN and infinity are refused). Unknown fields are ignored; fields
that would be dangerous are refused, and so are fields whose silent loss would change the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from proa.chat.dialect import ChatTurn
from proa.core.errors import UserError
from proa.server.chat_request import ChatRequest, ToolChoice, check_tool_names
from proa.server.field_types import (
    MAX_PROMPT_IDS,
    MAX_TOKEN_ID,
    Body,
    Flag,
    Integer,
    Name,
    Off,
    Text,
    TokenIds,
    at_most,
)
from proa.server.generation_request import MAX_CHOICES, MAX_MESSAGES, MAX_TOOLS, ChatBody, GenerationRequest
from proa.server.messages import Message, Thinking, Tool

__all__ = [
    "AbortRequest",
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "TokenizeRequest",
]

MAX_TEMPLATE_VARIABLES = 32
MAX_TOP_LOGPROBS = 20

# Clients with a field for everything send null for what was not set.
On = Annotated[Flag, BeforeValidator(lambda value: True if value is None else value)]


TemplateVariables = Annotated[
    dict[Name, bool | int | float | Annotated[Text, StringConstraints(max_length=10_000)] | None],
    at_most(MAX_TEMPLATE_VARIABLES),
]


class _Rendering(Body):
    """Tools, and how a conversation is rendered."""

    add_generation_prompt: Flag | None = None
    continue_final_message: Off = False
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: Thinking | None = None
    enable_thinking: Flag | None = None
    reasoning_effort: Name | None = None

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise UserError("continue_final_message", "add_generation_prompt: false beside it", "both")
        check_tool_names(tool.function.name for tool in self.tools or () if tool.function is not None)
        return self


class _Conversation(_Rendering):
    """Messages and how they are rendered."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]

    def turn(self) -> ChatTurn:
        """The conversation in the form that every API is translated to."""
        wants_prompt = self.add_generation_prompt
        return ChatTurn(
            messages=[message.as_openai(f"messages.{index}") for index, message in enumerate(self.messages)],
            tools=[tool.as_openai() for tool in self.tools or ()],
            no_calls=self.choice.mode == "none",
            thinking=self._thinking,
            keeps_thinking=self.thinking is not None and self.thinking.keep == "all",
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=not self.continue_final_message if wants_prompt is None else wants_prompt,
            continue_final_message=self.continue_final_message,
            variables=self.chat_template_kwargs or {},
        )

    @property
    def choice(self) -> ToolChoice:
        """What tool_choice means."""
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            if self.tool_choice.get("type") == "function" and isinstance(function, dict):
                return ToolChoice("required", str(function.get("name")))
            if self.tool_choice.get("type") == "allowed_tools":
                return _allowed_tools(self.tool_choice)
        elif self.tool_choice in (None, "auto"):
            return ToolChoice()
        elif self.tool_choice == "none":
            return ToolChoice("none")
        elif self.tool_choice == "required":
            return ToolChoice("required")
        raise UserError("tool_choice", "none, auto, required, a function or allowed_tools", str(self.tool_choice)[:100])

    @property
    def _thinking(self) -> bool | None:
        """Whether to think before the answer; None: as the model does."""
        if self.thinking is not None:
            return self.thinking.type != "disabled"
        if self.enable_thinking is not None:
            return self.enable_thinking
        return False if self.reasoning_effort == "none" else None


def _allowed_tools(choice: dict[str, Any]) -> ToolChoice:
    """OpenAI nests the members under a key of their own here."""
    allowed = choice.get("allowed_tools", choice)
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("tool_choice.allowed_tools", "mode and tools", str(allowed)[:100])
    functions = [tool.get("function", tool) for tool in tools]
    return ToolChoice.of_allowed(allowed.get("mode"), [str(f.get("name")) for f in functions if isinstance(f, dict)])


class ChatCompletionRequest(ChatBody, _Conversation):
    """POST /v1/chat/completions."""

    model_config = GenerationRequest.model_config
    PROMPT_FIELD: ClassVar[str] = "messages"

    max_completion_tokens: Annotated[Integer, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: Flag | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs", "logprobs: true beside it", "logprobs off")
        return self

    def chat(self) -> ChatRequest:
        """See ChatBody."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return ChatRequest(
            turn=self.turn(),
            tool_choice=self.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self.response_format,
            max_new_tokens=limit,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def _check_prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One error for all four forms: those of a union name the last form that was tried."""
    try:
        return handler(value)
    except ValidationError:
        ids = f"token ids from 0 to {MAX_TOKEN_ID} (at most {MAX_PROMPT_IDS})"
        raise ValueError(f"text without NUL characters, {ids}, or at most {MAX_CHOICES} of either") from None


Prompt = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(fail_fast=True), at_most(MAX_CHOICES)]
    | Annotated[list[TokenIds], Field(fail_fast=True), at_most(MAX_CHOICES)],
    WrapValidator(_check_prompt),
]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    PROMPT_FIELD: ClassVar[str] = "prompt"

    prompt: Prompt
    echo: Off = False
    add_special_tokens: On = True
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if not self.prompt:
            raise UserError("prompt", "a prompt that is not empty", "an empty one")
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise UserError("prompt", f"at most {MAX_CHOICES} prompts times n", len(self.prompts) * (self.n or 1))
        if self.echo and self.logprobs is not None:
            raise UserError("echo", "no logprobs beside it", "both", "prompt log-probabilities are not there")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str] | list[list[int]]", self.prompt)


class TokenizeRequest(_Rendering):
    """POST /tokenize: either `prompt` (llama.cpp: `content`) or `messages`."""

    model: Name | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    add_special_tokens: On = True
    return_token_strs: Off = False

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        given = [value for value in (self.prompt, self.content, self.messages) if value is not None]
        if len(given) != 1:
            raise UserError("prompt", "exactly one of prompt, content and messages", len(given))
        return self

    @property
    def text(self) -> str:
        """The text to tokenize when there are no messages."""
        return self.prompt if self.prompt is not None else self.content or ""

    def turn(self) -> ChatTurn:
        """The messages to render and tokenize, where there are any."""
        return _Conversation.model_construct(**dict(self)).turn()


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds
    skip_special_tokens: Off = False


class AbortRequest(Body):
    """POST /abort_request: `rid` is a response id, the request's `rid` or its X-Request-Id."""

    rid: Name = ""
    abort_all: Off = False
