"""How each family frames a tool call, for grammars: one table entry a family.

A family without an entry (arguments that are not JSON) cannot be made to call a tool; in `auto` it writes freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from proa.chat.output import deepseek_v31, kimi_k2, qwen3

__all__ = ["FRAMES", "CallFrame", "Marker", "Slot"]


class Slot(Enum):
    """What differs from call to call."""

    NAME = auto()
    JSON_NAME = auto()  # the name inside a JSON string
    NUMBER = auto()  # the call's number in the whole conversation
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of the family, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class CallFrame:
    """section: markers around a run of calls. call: text, markers and slots. separator: text between two calls."""

    call: tuple[str | Marker | Slot, ...]
    section: tuple[str, str] | None = None
    separator: str = ""


_KIMI = CallFrame(
    section=(kimi_k2.SECTION_BEGIN, kimi_k2.SECTION_END),
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
_DEEPSEEK_SECTION = (deepseek_v31.SECTION_BEGIN, deepseek_v31.SECTION_END)
_DEEPSEEK_V31 = CallFrame(
    section=_DEEPSEEK_SECTION,
    call=(
        Marker(deepseek_v31.CALL_BEGIN),
        Slot.NAME,
        Marker(deepseek_v31.SEPARATOR),
        Slot.ARGUMENTS,
        Marker(deepseek_v31.CALL_END),
    ),
)
_DEEPSEEK_V3 = CallFrame(
    section=_DEEPSEEK_SECTION,
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

FRAMES = {"kimi_k2": _KIMI, "deepseek_v31": _DEEPSEEK_V31, "deepseek_v3": _DEEPSEEK_V3, "qwen3": _QWEN3}
