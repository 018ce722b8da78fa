"""DeepSeek-V3 and R1: as V3.1, but `CB type SEP name`, a line break and the arguments in a `json` code fence."""

from __future__ import annotations

from dataclasses import replace

from proa.chat.output import deepseek_v31
from proa.chat.output.deepseek_v31 import CALL_BEGIN, SECTION_BEGIN, SEPARATOR
from proa.chat.output.json_body import FencedJsonBody
from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import State

__all__ = ["FORMAT"]

_TABLE = deepseek_v31.FORMAT.table
_OPEN = {SECTION_BEGIN: CallMachine.open_section, CALL_BEGIN: CallMachine.open_type}
_HEADER = {**_TABLE[State.NAME], CALL_BEGIN: CallMachine.open_type}

FORMAT = replace(
    deepseek_v31.FORMAT,
    table={
        State.REASONING: _OPEN,
        State.CONTENT: _OPEN,
        State.SECTION: {**_TABLE[State.SECTION], CALL_BEGIN: CallMachine.open_type},
        State.TYPE: {**_HEADER, SEPARATOR: CallMachine.open_call},
        # The name ends with its line, or where a fence or the arguments begin in the same line.
        State.NAME: {
            **_HEADER,
            SEPARATOR: CallMachine.drop,
            "\n": CallMachine.end_line,
            "`": CallMachine.open_arguments_here,
            "{": CallMachine.open_arguments_here,
        },
        State.ARGUMENTS: {**_TABLE[State.ARGUMENTS], CALL_BEGIN: CallMachine.close_and_open_type},
    },
    body=FencedJsonBody,
)
