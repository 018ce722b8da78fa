"""What a client asks of a conversation, whichever API it came through: every chat API is translated to this."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from proa.chat.dialect import ChatTurn
from proa.core.errors import UserError

__all__ = ["ChatRequest", "ToolChoice", "check_tool_names", "system_text"]

# Claude Code begins its system prompt with a line that differs in every request; no prefix would ever be found again.
_BILLING_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer calls tools.

    name: with `required`, the one function that is called. allowed: the functions that may be called of those the
    prompt shows, None: all.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: frozenset[str] | None = None

    @classmethod
    def of_allowed(cls, mode: Any, names: Iterable[str]) -> ToolChoice:
        """OpenAI's `allowed_tools`; UserError for another mode than auto and required."""
        if mode not in (None, "auto", "required"):
            raise UserError("tool_choice.mode", "auto or required", repr(mode)[:100])
        return cls("required" if mode == "required" else "auto", allowed=frozenset(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation and how it is to be answered; sampling stays in the body it came with.

    response_format: as in chat completions, None for text. max_new_tokens: None for the rest of the context.
    num_logprobs: alternatives per token, None without log-probabilities.
    """

    turn: ChatTurn
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    max_new_tokens: int | None = None
    num_logprobs: int | None = None

    def check_tool_choice(self) -> None:
        """Refuse a choice that the declared functions cannot fulfil.

        Raises:
            UserError: a call is required and there is no function, or not the one that is named; none is allowed.
        """
        names = {tool["function"]["name"] for tool in self.turn.tools if "function" in tool}
        if (allowed := self.tool_choice.allowed) is not None:
            if not names & allowed:
                raise UserError("tool_choice", "allowed_tools that tools declares", ", ".join(sorted(allowed))[:200])
            return
        if self.tool_choice.mode != "required":
            return
        if not names:
            raise UserError("tool_choice", "tools beside it", "none")
        if (name := self.tool_choice.name) is not None and name not in names:
            raise UserError("tool_choice", "a function of tools", repr(name[:200]))


def check_tool_names(names: Iterable[str]) -> None:
    """Refuse two functions of one name: the answer could not tell them apart."""
    (name, count), *_ = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise UserError("tools", "functions with different names", f"{name!r} twice")


def system_text(text: str) -> str:
    """A system message without what keeps a prefix from being found in the cache."""
    return _BILLING_LINE.sub("", text, count=1)
