"""DeepSeek-V3.2 and V4: `<｜DSML｜invoke name="NAME">` and parameters that say whether they are strings.

`｜DSML｜` is one token, the tags around it are text. Instead of parameters a call may hold one JSON object. V4 differs
in the name of the section only. Inside a section, tags without `｜DSML｜` count too: models forget it.
"""

from __future__ import annotations

from functools import partial

from proa.chat.output.output_format import THINK, THINK_END, OutputFormat
from proa.chat.output.xml_body import XmlBody, attribute_name, attribute_parameter
from proa.chat.output.xml_table import invoke_table

__all__ = ["FORMAT"]

DSML = "｜DSML｜"

FORMAT = OutputFormat(
    tokens=(THINK, THINK_END),
    table=invoke_table(
        [f"<{DSML}function_calls>", f"<{DSML}tool_calls>"],
        [f"</{DSML}function_calls>", f"</{DSML}tool_calls>"],
        prefixes=[DSML, ""],
    ),
    body=partial(XmlBody, read=attribute_parameter),
    name=attribute_name,
    text_tokens=(DSML,),
)
