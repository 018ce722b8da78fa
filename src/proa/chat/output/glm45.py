"""GLM-4.5 to GLM-5.2: `<tool_call>NAME(<arg_key>KEY</arg_key><arg_value>value</arg_value>)*</tool_call>`.

Every tag is one token. GLM-4.5 and 4.6 put line breaks between them, later models do not. Strings stand as they are,
other values as JSON.
"""

from __future__ import annotations

from proa.chat.output.machine import THINK, THINK_END, CallMachine, OutputFormat, State
from proa.chat.output.qwen3 import CALL_BEGIN, CALL_END
from proa.chat.output.tools import BLANKS
from proa.chat.output.xml_body import XmlBody

__all__ = ["FORMAT"]

_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"

_OPEN = {CALL_BEGIN: CallMachine.open_call}
_END = {CALL_BEGIN: CallMachine.close_and_open_call, CALL_END: CallMachine.close_call_and_section}

FORMAT = OutputFormat(
    tokens=(CALL_BEGIN, CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END, THINK, THINK_END),
    table={
        State.REASONING: _OPEN,
        State.CONTENT: _OPEN,
        State.NAME: {
            _KEY: CallMachine.close_name_here,
            _VALUE: CallMachine.close_name_here,
            CALL_BEGIN: CallMachine.open_call,
            CALL_END: CallMachine.close_bare_call,
        },
        State.BODY: {_KEY: CallMachine.open_key, _VALUE: CallMachine.open_value, **_END},
        State.KEY: {
            _KEY: CallMachine.open_key,
            _KEY_END: CallMachine.close_key,
            _VALUE: CallMachine.open_value,
            **_END,
        },
        State.VALUE: {_VALUE_END: CallMachine.close_value, **_END},
    },
    body=XmlBody,
    # Behind the name there may be talk.
    name=lambda header: header.strip(BLANKS).partition("\n")[0].rstrip(BLANKS),
)
