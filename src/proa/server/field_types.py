"""Field types and limits of request bodies: strict numbers, text without NUL, lists of bounded length."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

__all__ = [
    "MAX_PROMPT_IDS",
    "MAX_TOKEN_ID",
    "Body",
    "Flag",
    "Integer",
    "Name",
    "Number",
    "Off",
    "Text",
    "TokenId",
    "TokenIds",
    "at_most",
]

MAX_TOKEN_ID = 2**31 - 1
MAX_PROMPT_IDS = 2_000_000


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("text without NUL characters")
    return text


def at_most(limit: int) -> BeforeValidator:
    """Refuses a longer list or object before its items are looked at: each bad item would cost an error object."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"at most {limit} items")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_no_nul)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
# Clients with a field for everything send null for what was not set.
Off = Annotated[Flag, BeforeValidator(lambda value: False if value is None else value)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_PROMPT_IDS)]
Name = Annotated[str, StringConstraints(max_length=1024)]


class Body(BaseModel):
    """A request body, or a part of one: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, str_strip_whitespace=False, hide_input_in_errors=True)
