"""Qwen2.5, Qwen3 and all that write as Hermes does: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

Both markers are one token each in Qwen's checkpoints; calls stand one behind the other without a section around them.
"""

from __future__ import annotations

from proa.chat.output.envelope import EnvelopeBody
from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat, State

__all__ = ["CALL_BEGIN", "CALL_END", "FORMAT"]

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"

FORMAT = OutputFormat(
    tokens=(CALL_BEGIN, CALL_END, THINK, THINK_END),
    table={
        State.REASONING: {CALL_BEGIN: CallMachine.open_envelope},
        State.CONTENT: {CALL_BEGIN: CallMachine.open_envelope},
        State.ARGUMENTS: {
            CALL_END: CallMachine.close_call_and_section,
            CALL_BEGIN: CallMachine.close_and_open_envelope,
        },
    },
    body=EnvelopeBody,
)
