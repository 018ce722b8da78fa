"""What the bodies of all routes that generate have in common: sampling fields, limits, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from proa.core.errors import UserError
from proa.server.chat_request import ChatRequest
from proa.server.field_types import MAX_TOKEN_ID, Body, Flag, Integer, Name, Number, Off, Text, TokenId, at_most

__all__ = [
    "MAX_CHOICES",
    "MAX_MESSAGES",
    "MAX_STOPS",
    "MAX_TOOLS",
    "ChatBody",
    "GenerationRequest",
    "StreamOptions",
    "check_stops",
]

MAX_CHOICES = 128
MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 10_000
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 128
MAX_STOPS = 16
MAX_TOOLS = 10_000
# A logit divided by less leaves float32.
MIN_REPETITION_PENALTY = 1e-6

Grammar = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]

_FORBIDDEN = ("prompt_embeds", "custom_logit_processor", "logits_processors", "lora_path", "chat_template")
_UNSUPPORTED = (
    "suffix", "prompt_logprobs", "functions", "audio", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "bad_words", "allowed_token_ids", "beam_width",
)  # fmt: skip


def check_stops(value: str | list[str] | None) -> str | list[str] | None:
    """Refuses stop strings that are empty or too long."""
    stops = [value] if isinstance(value, str) else value or []
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"stop strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return value


class StreamOptions(Body):
    """When the usage is sent in a stream."""

    include_usage: Off = False
    continuous_usage_stats: Off = False


class GenerationRequest(Body):
    """What chat completions and completions share."""

    # Kept only to refuse what must not be ignored.
    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    # The field that holds the prompt, for errors.
    PROMPT_FIELD: ClassVar[str]

    model: Name | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[Integer, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=MIN_REPETITION_PENALTY, le=100)] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str | list[str] | None, at_most(MAX_STOPS)] = None
    stop_token_ids: Annotated[list[TokenId] | None, at_most(MAX_STOP_TOKENS)] = None
    ignore_eos: Flag | None = None
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None, at_most(MAX_LOGIT_BIAS)] = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    response_format: dict[str, Any] | None = None
    # SGLang's names for what the answer must be.
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    json_schema: Grammar | None = None
    user: Name | None = None
    rid: Name | None = None

    _check_stop = field_validator("stop")(check_stops)

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
            raise ValueError("token ids as keys")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        extra = self.model_extra or {}
        for field in _FORBIDDEN:
            if extra.get(field) is not None:
                raise UserError(
                    field, "no such field", "one", "remove it: it is never accepted", code="forbidden_field"
                )
        for field in _UNSUPPORTED:
            if extra.get(field) not in (None, "", [], {}):
                raise _unsupported(field)
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise _unsupported("best_of")
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options", "stream: true beside it", "stream off")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _unsupported(field: str) -> UserError:
    return UserError(field, "a field this server has", "one it does not", "remove it", code="unsupported_parameter")


class ChatBody(GenerationRequest):
    """The body of a chat API."""

    def chat(self) -> ChatRequest:
        """The request in the form that every API is translated to.

        Raises:
            UserError: what no model could be asked.
        """
        raise NotImplementedError
