"""GLM-4.5 to GLM-5.2: `<tool_call>NAME(<arg_key>KEY</arg_key><arg_value>value</arg_value>)*</tool_call>`.

Every tag is one token. GLM-4.5 and 4.6 put line breaks between them, later models do not. Strings stand as they are,
other values as JSON.
"""

from __future__ import annotations

from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import THINK, THINK_END, OutputFormat, State
from proa.chat.output.qwen3 import CALL_BEGIN, CALL_END
from proa.chat.output.tools import BLANKS
from proa.chat.output.xml_body import XmlBody

__all__ = ["FORMAT", "KEY", "KEY_END", "VALUE", "VALUE_END"]

KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"

_OPEN = {CALL_BEGIN: CallMachine.open_call}
_END = {CALL_BEGIN: CallMachine.close_and_open_call, CALL_END: CallMachine.close_call_and_section}

FORMAT = OutputFormat(
    tokens=(CALL_BEGIN, CALL_END, KEY, KEY_END, VALUE, VALUE_END, THINK, THINK_END),
    table={
        State.REASONING: _OPEN,
        State.CONTENT: _OPEN,
        State.NAME: {
            KEY: CallMachine.close_name_here,
            VALUE: CallMachine.close_name_here,
            CALL_BEGIN: CallMachine.open_call,
            CALL_END: CallMachine.close_bare_call,
        },
        State.BODY: {KEY: CallMachine.open_key, VALUE: CallMachine.open_value, **_END},
        State.KEY: {
            KEY: CallMachine.open_key,
            KEY_END: CallMachine.close_key,
            VALUE: CallMachine.open_value,
            **_END,
        },
        State.VALUE: {VALUE_END: CallMachine.close_value, **_END},
    },
    body=XmlBody,
    # Behind the name there may be talk.
    name=lambda header: header.strip(BLANKS).partition("\n")[0].rstrip(BLANKS),
)
