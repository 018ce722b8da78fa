"""How each family frames a tool call, for grammars: one table entry a family.

A family without an entry cannot be made to call a tool; in `auto` it writes freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from proa.chat.grammar.rules import Marker, Maybe, Pattern, Piece
from proa.chat.output import deepseek_v31, glm45, kimi_k2, minimax_m2, mistral, qwen3, qwen3_coder
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat, State

__all__ = ["CallFrame", "ParameterFrame", "Slot", "call_frame"]


class Slot(Enum):
    """What differs from call to call."""

    NAME = auto()
    JSON_NAME = auto()  # the name inside a JSON string
    QUOTED_NAME = auto()  # the name as the value of an attribute
    NUMBER = auto()  # the call's number in the whole conversation
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFrame:
    """Arguments that are written one by one, strings as they are and other values as JSON.

    before, between, behind: the pieces around a parameter's name and value. after: what may follow a parameter.
    stops: markers that end a value, or vanish in it. has_line_breaks: a value stands on lines of its own.
    forbidden: characters that no name of a parameter can have here.
    """

    before: tuple[Piece, ...]
    between: tuple[Piece, ...]
    behind: tuple[str | Marker, ...]
    after: tuple[Piece, ...]
    stops: frozenset[str]
    has_line_breaks: bool = False
    forbidden: str = "<>\n\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """call: the pieces of one call. begin, end: what stands around a run of calls. separator: text between two calls.

    parameters: None: the arguments are one JSON object.
    """

    call: tuple[Piece | Slot, ...]
    begin: tuple[Piece, ...] = ()
    end: tuple[Piece, ...] = ()
    separator: str = ""
    parameters: ParameterFrame | None = None


def call_frame(family: str, marker_ids: Mapping[str, int]) -> CallFrame | None:
    """The frame of a family in a checkpoint that has these markers as tokens; None where there is none."""
    if family == "mistral":
        return _MISTRAL if mistral.ARGUMENTS in marker_ids else _MISTRAL_LIST
    return _FRAMES.get(family)


def _stops(form: OutputFormat) -> frozenset[str]:
    return frozenset({*form.tokens, *form.table[State.VALUE]} - {THINK, THINK_END})


_LINE = Maybe(("\n",))

_KIMI = CallFrame(
    begin=(Marker(kimi_k2.SECTION_BEGIN),),
    end=(Marker(kimi_k2.SECTION_END),),
    call=(
        Marker(kimi_k2.CALL_BEGIN),
        "functions.",
        Slot.NAME,
        ":",
        Slot.NUMBER,
        Marker(kimi_k2.ARGUMENT_BEGIN),
        Slot.ARGUMENTS,
        Marker(kimi_k2.CALL_END),
    ),
)
_DEEPSEEK_V31 = CallFrame(
    begin=(Marker(deepseek_v31.SECTION_BEGIN),),
    end=(Marker(deepseek_v31.SECTION_END),),
    call=(
        Marker(deepseek_v31.CALL_BEGIN),
        Slot.NAME,
        Marker(deepseek_v31.SEPARATOR),
        Slot.ARGUMENTS,
        Marker(deepseek_v31.CALL_END),
    ),
)
_DEEPSEEK_V3 = CallFrame(
    begin=_DEEPSEEK_V31.begin,
    end=_DEEPSEEK_V31.end,
    call=(
        Marker(deepseek_v31.CALL_BEGIN),
        "function",
        Marker(deepseek_v31.SEPARATOR),
        Slot.NAME,
        "\n```json\n",
        Slot.ARGUMENTS,
        "\n```",
        Marker(deepseek_v31.CALL_END),
    ),
    separator="\n",
)
_QWEN3 = CallFrame(
    call=(
        Marker(qwen3.CALL_BEGIN),
        '\n{"name": "',
        Slot.JSON_NAME,
        '", "arguments": ',
        Slot.ARGUMENTS,
        "}\n",
        Marker(qwen3.CALL_END),
    ),
    separator="\n",
)
_QWEN3_CODER = CallFrame(
    call=(
        Marker(qwen3.CALL_BEGIN),
        "\n<function=",
        Slot.NAME,
        ">\n",
        Slot.ARGUMENTS,
        "</function>\n",
        Marker(qwen3.CALL_END),
    ),
    separator="\n",
    parameters=ParameterFrame(
        before=("<parameter=",),
        between=(">",),
        behind=("</parameter>",),
        after=("\n",),
        stops=_stops(qwen3_coder.FORMAT),
        has_line_breaks=True,
    ),
)
_GLM = CallFrame(
    call=(Marker(qwen3.CALL_BEGIN), Slot.NAME, _LINE, Slot.ARGUMENTS, Marker(qwen3.CALL_END)),
    separator="\n",
    parameters=ParameterFrame(
        before=(Marker(glm45.KEY),),
        between=(Marker(glm45.KEY_END), _LINE, Marker(glm45.VALUE)),
        behind=(Marker(glm45.VALUE_END),),
        after=(_LINE,),
        stops=_stops(glm45.FORMAT),
    ),
)
_MINIMAX_M2 = CallFrame(
    begin=(Marker(minimax_m2.SECTION_BEGIN), "\n"),
    end=(Marker(minimax_m2.SECTION_END),),
    call=("<invoke name=", Slot.QUOTED_NAME, ">\n", Slot.ARGUMENTS, "</invoke>\n"),
    parameters=ParameterFrame(
        before=('<parameter name="',),
        between=('">',),
        behind=("</parameter>",),
        after=("\n",),
        stops=_stops(minimax_m2.FORMAT),
        forbidden='<>\n\r"',
    ),
)
_MISTRAL = CallFrame(
    call=(
        Marker(mistral.CALL),
        Slot.NAME,
        Maybe((Marker(mistral.ID), Pattern("[a-zA-Z0-9]{9}"))),
        Marker(mistral.ARGUMENTS),
        Slot.ARGUMENTS,
    ),
)
# Checkpoints without a token between name and arguments write one list.
_MISTRAL_LIST = CallFrame(
    begin=(Marker(mistral.CALL), Maybe((" ",)), "["),
    end=("]",),
    call=('{"name": "', Slot.JSON_NAME, '", "arguments": ', Slot.ARGUMENTS, "}"),
    separator=", ",
)

_FRAMES = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": _KIMI,
    "minimax_m2": _MINIMAX_M2,
    "qwen3": _QWEN3,
    "qwen3_coder": _QWEN3_CODER,
}
