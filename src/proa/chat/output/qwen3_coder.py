"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME>(<parameter=KEY>value</parameter>)*</function></tool_call>`.

Only the outer tags are tokens. Values stand on lines of their own. Some answers lack the outer tags: `<function=` alone
begins a call when it names a declared tool.
"""

from __future__ import annotations

from functools import partial

from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat, State
from proa.chat.output.qwen3 import CALL_BEGIN, CALL_END
from proa.chat.output.tools import BLANKS
from proa.chat.output.xml_body import XmlBody

__all__ = ["FORMAT"]

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"

_OPEN = {CALL_BEGIN: CallMachine.open_section, _FUNCTION: CallMachine.open_maybe}
_END = {
    CALL_BEGIN: CallMachine.close_call,
    CALL_END: CallMachine.close_call_and_section,
}

FORMAT = OutputFormat(
    tokens=(CALL_BEGIN, CALL_END, THINK, THINK_END),
    table={
        State.REASONING: _OPEN,
        State.CONTENT: _OPEN,
        State.SECTION: {_FUNCTION: CallMachine.open_call, CALL_END: CallMachine.close_section},
        # A name has neither blanks nor brackets.
        State.MAYBE_NAME: {">": CallMachine.confirm, **dict.fromkeys((*BLANKS, "<"), CallMachine.retract)},
        State.NAME: {
            ">": CallMachine.close_name,
            CALL_BEGIN: CallMachine.open_section,
            CALL_END: CallMachine.close_section,
        },
        State.BODY: {
            _PARAMETER: CallMachine.open_key,
            _FUNCTION: CallMachine.close_and_open_call,
            _FUNCTION_END: CallMachine.close_call,
            **_END,
        },
        State.KEY: {">": CallMachine.open_value, **_END},
        State.VALUE: {_PARAMETER_END: CallMachine.close_value, **_END},
    },
    body=partial(XmlBody, has_line_breaks=True),
)
