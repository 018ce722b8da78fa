"""MiniMax-M2 to M2.7: `SB (<invoke name="NAME">(<parameter name="KEY">value</parameter>)*</invoke>)+ SE`.

Only the section's markers are tokens.
"""

from __future__ import annotations

from functools import partial

from proa.chat.output.output_format import THINK, THINK_END, OutputFormat
from proa.chat.output.xml_body import XmlBody, attribute_name, attribute_parameter
from proa.chat.output.xml_table import invoke_table

__all__ = ["FORMAT", "SECTION_BEGIN", "SECTION_END"]

SECTION_BEGIN = "<minimax:tool_call>"
SECTION_END = "</minimax:tool_call>"

FORMAT = OutputFormat(
    tokens=(SECTION_BEGIN, SECTION_END, THINK, THINK_END),
    table=invoke_table([SECTION_BEGIN], [SECTION_END], prefixes=[""]),
    body=partial(XmlBody, read=attribute_parameter),
    name=attribute_name,
)
