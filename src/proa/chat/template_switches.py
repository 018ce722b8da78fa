"""What a request asks for beside its messages, in the variables that a chat template reads.

Templates name the same switch differently (`thinking`, `enable_thinking`); a client may use any of the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from proa.chat.output.output_format import THINK, THINK_END
from proa.core.errors import UserError

__all__ = ["TemplateSwitches", "flag_of"]

_THINKING = ("thinking", "enable_thinking")
# Taken whatever the template reads: clients set them for any model.
_COMMON = frozenset({*_THINKING, "clear_thinking", "preserve_thinking", "reasoning_effort"})


class _Turn(Protocol):
    @property
    def thinking(self) -> bool | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def variables(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class TemplateSwitches:
    """`variables` for the template. `thinking`: what the request asks for, None: nothing."""

    variables: dict[str, Any]
    thinking: bool | None

    @classmethod
    def of(cls, turn: _Turn, readable: AbstractSet[str]) -> TemplateSwitches:
        """The switches of `turn` for a template that reads the variables `readable`.

        Its `chat_template_kwargs` count before its fields. An effort asks for thinking, `none` for none of it.

        Raises:
            UserError: a variable that neither the template reads nor clients commonly set, or a switch that is no bool.
        """
        given = dict(turn.variables)
        if unknown := sorted(set(given) - readable - _COMMON):
            known = ", ".join(sorted(readable | _COMMON))
            raise UserError("chat_template_kwargs", f"only {known}", ", ".join(unknown))
        effort = given.pop("reasoning_effort", None) or turn.reasoning_effort
        asked = turn.thinking
        if asked is None and isinstance(effort, str):
            asked = effort != "none"
        for name in _THINKING:
            value = flag_of(given, name)
            asked = value if value is not None else asked
            given.pop(name, None)
        variables = {name: value for name, value in given.items() if name in readable}
        if asked is not None:
            variables |= {name: asked for name in _THINKING if name in readable}
        if effort is not None and effort != "none" and "reasoning_effort" in readable:
            variables["reasoning_effort"] = effort
        return cls(variables, asked)

    def end_of_thinking(self, prompt: str) -> str:
        """What ends the thinking that a template without a switch began against the request's wish."""
        return f"{THINK_END}\n\n" if self.thinking is False and prompt.rstrip().endswith(THINK) else ""


def flag_of(variables: Mapping[str, Any], name: str) -> bool | None:
    """The bool `name`, None when it is not given. UserError for anything else."""
    value = variables.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"chat_template_kwargs.{name}", "true or false", repr(value))
    return value
