"""Mixtral and Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": ...}, ...]`, or `([TOOL_CALLS]NAME[ARGS]JSON)+`.

The markers are one token each; nothing marks the end of a call. `[CALL_ID]id` may stand behind the name, and `[ARGS]`
may be missing.
"""

from __future__ import annotations

from proa.chat.output.envelope import EnvelopeBody
from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat, State
from proa.chat.output.tools import BLANKS

__all__ = ["ARGUMENTS", "CALL", "FORMAT", "ID"]

CALL = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"

_HEADER = {
    CALL: CallMachine.open_call,
    ARGUMENTS: CallMachine.open_arguments,
    "{": CallMachine.open_arguments_here,
}

FORMAT = OutputFormat(
    tokens=(CALL, ID, ARGUMENTS, THINK, THINK_END),
    table={
        State.REASONING: {CALL: CallMachine.open_call},
        State.CONTENT: {CALL: CallMachine.open_call},
        State.NAME: {**_HEADER, ID: CallMachine.close_header},
        State.TYPE: _HEADER,
        State.ARGUMENTS: {CALL: CallMachine.close_and_open_call},
    },
    body=EnvelopeBody,
    # The bracket of a list: the names are inside.
    name=lambda header: header.strip(f"{BLANKS}["),
)
