"""DeepSeek-V3.1: `SB (CB name SEP arguments CE)+ SE`, each marker one token, arguments as JSON."""

from __future__ import annotations

from proa.chat.output.json_body import JsonBody
from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat, State

__all__ = ["CALL_BEGIN", "CALL_END", "FORMAT", "SECTION_BEGIN", "SECTION_END", "SEPARATOR"]

SECTION_BEGIN = "<｜tool▁calls▁begin｜>"
SECTION_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"

_OPEN = {SECTION_BEGIN: CallMachine.open_section, CALL_BEGIN: CallMachine.open_call}

FORMAT = OutputFormat(
    tokens=(SECTION_BEGIN, SECTION_END, CALL_BEGIN, SEPARATOR, CALL_END, THINK, THINK_END),
    table={
        State.REASONING: _OPEN,
        State.CONTENT: _OPEN,
        State.SECTION: {CALL_BEGIN: CallMachine.open_call, SECTION_END: CallMachine.close_section},
        State.NAME: {
            SEPARATOR: CallMachine.open_arguments,
            CALL_BEGIN: CallMachine.open_call,
            CALL_END: CallMachine.open_section,
            SECTION_BEGIN: CallMachine.open_section,
            SECTION_END: CallMachine.close_section,
        },
        State.ARGUMENTS: {
            CALL_END: CallMachine.close_call,
            SECTION_BEGIN: CallMachine.close_call,
            CALL_BEGIN: CallMachine.close_and_open_call,
            SECTION_END: CallMachine.close_call_and_section,
        },
    },
    body=JsonBody,
)
