# ruff: noqa: E501 - one case a line
"""Cases that only one family has: (arguments of `write_cases.case`, its keywords)."""

from __future__ import annotations

from typing import Any

from case_writers import CB, CE, DSML, SB, SE, SEP

Own = tuple[tuple[Any, ...], dict[str, Any]]
CUT = {"finish": "length"}
OSLO = '{"place": "Oslo"}'
W = ("weather", OSLO)


def own(*args: Any, **more: Any) -> Own:
    return args, more


_V31 = f"{CB}weather{SEP}{OSLO}{CE}"
_DEEPSEEK_V31 = [
    own("no section markers", f"A{_V31}", "A", None, W),
    own("no end of the section", f"{SB}{_V31}", None, None, W),
    own("no end of the first call", f"{SB}{CB}weather{SEP}{OSLO}{_V31}{SE}", None, None, W, W),
    own("the section ends the call", f"{SB}{CB}weather{SEP}{OSLO}{SE}B", "B", None, W),
    own("blanks around name and arguments", f"{SB}{CB} weather \n{SEP}\n{OSLO} \n{CE}{SE}", None, None, W),
    own("text inside a section", f"{SB} so: {_V31} and {SE}", None, None, W),
    own("header begun anew", f"{SB}{CB}junk{_V31}{SE}", None, None, W),
    own("header without arguments", f"A{SB}{CB}weather{CE}{SE}", "A", None),
    own("no arguments at all", f"{SB}{CB}ping{SEP}{CE}{SE}", None, None, ("ping", "{}")),
    own("cut in the arguments", f'{SB}{CB}weather{SEP}{{"place": "Os', None, None, ("weather", '{"place": "Os'), **CUT),
    own("malformed", f"{SB}{CB}weather{SEP}{{place: Oslo}}{CE}{SE}", None, None, ("weather", "{place: Oslo}")),
    own("compact", f'{SB}{CB}weather{SEP}{{"place":"Oslo"}}{CE}{SE}', None, None, ("weather", '{"place":"Oslo"}')),
    own("arguments in a string", f'{SB}{CB}weather{SEP}"{{\\"place\\": \\"Oslo\\"}}"{CE}{SE}', None, None, W),
    own("prefix of another family", f"{SB}{CB}functions.weather{SEP}{OSLO}{CE}{SE}", None, None, W),
    own("empty name, by the arguments", f"{SB}{CB}{SEP}{OSLO}{CE}{SE}", None, None, W),
    own("empty name, nothing by the arguments", f'A{SB}{CB}{SEP}{{"z":1}}{CE}{SE}', 'A{"z":1}', None),
    own(
        "separator in the arguments is dropped", f'{SB}{CB}weather{SEP}{{"place": {SEP}"Oslo"}}{CE}{SE}', None, None, W
    ),
]

_V3_ARGS = f"\n```json\n{OSLO}\n```"
_V3 = f"{CB}function{SEP}weather{_V3_ARGS}{CE}"
_DEEPSEEK_V3 = [
    own("no section markers", f"A{_V3}", "A", None, W),
    own("no end of the call", f"{SB}{CB}function{SEP}weather{_V3_ARGS}{SE}B", "B", None, W),
    own("no end of the first call", f"{SB}{CB}function{SEP}weather{_V3_ARGS}{_V3}{SE}", None, None, W, W),
    own("no fence", f"{SB}{CB}function{SEP}weather\n{OSLO}{CE}{SE}", None, None, W),
    own("a fence without a language", f"{SB}{CB}function{SEP}weather\n```\n{OSLO}\n```\n{CE}{SE}", None, None, W),
    own("no closing fence", f"{SB}{CB}function{SEP}weather\n```json\n{OSLO}{CE}{SE}", None, None, W),
    own("all in one line", f"{SB}{CB}function{SEP}weather{OSLO}{CE}{SE}", None, None, W),
    own("a fence behind the name", f"{SB}{CB}function{SEP}weather```json\n{OSLO}```{CE}{SE}", None, None, W),
    own("no type", f"{SB}{CB}{SEP}weather{_V3_ARGS}{CE}{SE}", None, None, W),
    own("a line break before the name", f"{SB}{CB}function{SEP}\nweather{_V3_ARGS}{CE}{SE}", None, None, W),
    own(
        "a fence inside a string",
        f'{SB}{CB}function{SEP}search\n```json\n{{"query": "```py\\nx\\n```"}}\n```{CE}{SE}',
        None, None, ("search", '{"query": "```py\\nx\\n```"}'),
    ),
    own(
        "arguments over several lines",
        f'{SB}{CB}function{SEP}weather\n```json\n{{\n  "place": "Oslo"\n}}\n```{CE}{SE}',
        None, None, ("weather", '{\n  "place": "Oslo"\n}'),
    ),
    own("an empty fence", f"{SB}{CB}function{SEP}ping\n```json\n```{CE}{SE}", None, None, ("ping", "{}")),
    own(
        "cut in the arguments", f'{SB}{CB}function{SEP}weather\n```json\n{{"pl', None, None, ("weather", '{"pl'), **CUT
    ),
    own("cut in the fence", f"{SB}{CB}function{SEP}weather\n``", None, None, ("weather", "{}"), **CUT),
    own("cut in the type", f"A{SB}{CB}func", "A", None, **CUT),
    own("malformed", f"{SB}{CB}function{SEP}weather\n```json\n{{x}}\n```{CE}{SE}", None, None, ("weather", "{x}")),
    own("no name, by the arguments", f"{SB}{CB}function{SEP}{OSLO}{CE}{SE}", None, None, W),
]  # fmt: skip

_D0, _D1 = f"<{DSML}function_calls>\n", f"\n</{DSML}function_calls>"
_PLACE = f'<{DSML}parameter name="place" string="true">Oslo</{DSML}parameter>\n'
_INVOKE = f'<{DSML}invoke name="weather">\n{_PLACE}'
_DEEPSEEK_V32 = [
    own("the section of V4", f"<{DSML}tool_calls>\n{_INVOKE}</{DSML}invoke>\n</{DSML}tool_calls>", None, None, W),
    own("JSON instead of parameters", f'{_D0}<{DSML}invoke name="weather">\n{OSLO}\n</{DSML}invoke>{_D1}', None, None, W),
    own("JSON is passed as it is", f'{_D0}<{DSML}invoke name="weather">{{"a":1}}</{DSML}invoke>{_D1}', None, None, ("weather", '{"a":1}')),
    own("cut in the JSON", f'{_D0}<{DSML}invoke name="weather">\n{{"pla', None, None, ("weather", '{"pla'), **CUT),
    own("tags without DSML", f'{_D0}<invoke name="weather">\n<parameter name="place" string="true">Oslo</parameter>\n</invoke>{_D1}', None, None, W),
    own("mixed tags", f'{_D0}<{DSML}invoke name="weather">\n<parameter name="place" string="true">Oslo</{DSML}parameter>\n</invoke>{_D1}', None, None, W),
    own("no end of the call", f"{_D0}{_INVOKE}{_D1}B", "B", None, W),
    own("no end of the first call", f"{_D0}{_INVOKE}{_INVOKE}</{DSML}invoke>{_D1}", None, None, W, W),
    own("a section inside a value", f'{_D0}<{DSML}invoke name="weather"><{DSML}parameter name="place" string="true">Oslo{_D0}{_INVOKE}</{DSML}invoke>{_D1}', None, None, W, W),
    own("the model stops in the call", f"{_D0}{_INVOKE}", None, None, W),
    own("cut behind a value", f"{_D0}{_INVOKE}", None, None, ("weather", '{"place": "Oslo"'), **CUT),
    own("cut in a string", f'{_D0}<{DSML}invoke name="weather">\n<{DSML}parameter name="place" string="true">Os', None, None, ("weather", '{"place": "Os'), **CUT),
    own("cut in a number", f'{_D0}{_INVOKE}<{DSML}parameter name="days" string="false">1', None, None, ("weather", '{"place": "Oslo"'), **CUT),
    own("cut before the first parameter", f'{_D0}<{DSML}invoke name="weather">\n', None, None, ("weather", "{"), **CUT),
    own("string says the schema lies", f'{_D0}<{DSML}invoke name="weather"><{DSML}parameter name="days" string="true">3</{DSML}parameter></{DSML}invoke>{_D1}', None, None, ("weather", '{"days": "3"}')),
    own("no string attribute: the schema", f'{_D0}<{DSML}invoke name="weather"><{DSML}parameter name="days">3</{DSML}parameter></{DSML}invoke>{_D1}', None, None, ("weather", '{"days": 3}')),
    own("malformed JSON is a string", f'{_D0}<{DSML}invoke name="search"><{DSML}parameter name="filters" string="false">{{a:1}}</{DSML}parameter></{DSML}invoke>{_D1}', None, None, ("search", '{"filters": "{a:1}"}')),
    own("an invoke outside a section is text", f'<{DSML}invoke name="weather">x', f'<{DSML}invoke name="weather">x', None),
    own("the token alone is text", f"The token {DSML} is odd.", f"The token {DSML} is odd.", None),
    own("look-alikes in a value", f'{_D0}<{DSML}invoke name="search"><{DSML}parameter name="query" string="true"><{DSML}parameter> </{DSML}invoke> </parameters></{DSML}parameter></{DSML}invoke>{_D1}', None, None, ("search", f'{{"query": "<{DSML}parameter> </{DSML}invoke> </parameters>"}}')),
]  # fmt: skip

_KEY = "<arg_key>place</arg_key>"
_VALUE = "<arg_value>Oslo</arg_value>"
_GLM = [
    own("the other line breaks", f"<tool_call> weather\n\n{_KEY} \n {_VALUE}</tool_call>", None, None, W),
    own("a name and nothing else", "<tool_call>ping</tool_call>", None, None, ("ping", "{}")),
    own("an empty call is none", "A<tool_call> \n</tool_call>B", "AB", None),
    own("talk behind the name", f"<tool_call>weather\nin Oslo{_KEY}{_VALUE}</tool_call>", None, None, W),
    own("no end of the first call", f"<tool_call>weather{_KEY}{_VALUE}<tool_call>ping</tool_call>", None, None, W, ("ping", "{}")),
    own("no end of a value", f"<tool_call>weather{_KEY}<arg_value>Oslo</tool_call>B", "B", None, W),
    own("no end of a key", f"<tool_call>weather<arg_key>place{_VALUE}</tool_call>", None, None, W),
    own("a key without a value", f"<tool_call>weather<arg_key>x</arg_key>{_KEY}{_VALUE}</tool_call>", None, None, W),
    own("a value without a key", f"<tool_call>weather<arg_value>x</arg_value>{_KEY}{_VALUE}</tool_call>", None, None, ("weather", OSLO)),
    own("the model stops in the call", f"<tool_call>weather{_KEY}{_VALUE}", None, None, W),
    own("cut behind a value", f"<tool_call>weather{_KEY}{_VALUE}", None, None, ("weather", '{"place": "Oslo"'), **CUT),
    own("cut in a string", f"<tool_call>weather{_KEY}<arg_value>Os", None, None, ("weather", '{"place": "Os'), **CUT),
    own("cut in a number", "<tool_call>weather<arg_key>days</arg_key><arg_value>1", None, None, ("weather", "{"), **CUT),
    own("cut in a key", "<tool_call>weather<arg_key>da", None, None, ("weather", "{"), **CUT),
    own("True as Python writes it", "<tool_call>weather<arg_key>celsius</arg_key><arg_value>True</arg_value></tool_call>", None, None, ("weather", '{"celsius": true}')),
    own("a number that is none", "<tool_call>weather<arg_key>days</arg_key><arg_value>three</arg_value></tool_call>", None, None, ("weather", '{"days": "three"}')),
    own("a number with blanks", "<tool_call>weather<arg_key>days</arg_key><arg_value> 3\n</arg_value></tool_call>", None, None, ("weather", '{"days": 3}')),
    own("malformed JSON is a string", "<tool_call>search<arg_key>tags</arg_key><arg_value>[1,</arg_value></tool_call>", None, None, ("search", '{"tags": "[1,"}')),
]  # fmt: skip

_M0, _M1 = "<minimax:tool_call>\n", "\n</minimax:tool_call>"
_M = '<invoke name="weather">\n<parameter name="place">Oslo</parameter>\n'
_MINIMAX_M2 = [
    own("all in one line", '<minimax:tool_call><invoke name="weather"><parameter name="place">Oslo</parameter></invoke></minimax:tool_call>', None, None, W),
    own("single quotes, more blanks", f"{_M0}<invoke  name='weather' >\n<parameter name='place'>Oslo</parameter></invoke>{_M1}", None, None, W),
    own("no end of the call", f"{_M0}{_M}{_M1}B", "B", None, W),
    own("no end of the first call", f"{_M0}{_M}{_M}</invoke>{_M1}", None, None, W, W),
    own("a section inside a value", f'{_M0}<invoke name="weather"><parameter name="place">Oslo{_M0}{_M}</invoke>{_M1}', None, None, W, W),
    own("no end of a value", f'{_M0}<invoke name="weather"><parameter name="place">Oslo</minimax:tool_call>', None, None, W),
    own("no end of the section", f"{_M0}{_M}</invoke>", None, None, W),
    own("the model stops in the call", f"{_M0}{_M}", None, None, W),
    own("cut behind a value", f"{_M0}{_M}", None, None, ("weather", '{"place": "Oslo"'), **CUT),
    own("cut in a string", f'{_M0}<invoke name="weather"><parameter name="place">Os</par', None, None, ("weather", '{"place": "Os</par'), **CUT),
    own("cut in the header", f'A{_M0}<invoke name="weat', "A", None, **CUT),
    own("text inside a section", f"{_M0}so: {_M}</invoke> and{_M1}", None, None, W),
    own("an invoke outside a section is text", '<invoke name="weather">x</invoke>', '<invoke name="weather">x</invoke>', None),
    own("no name, by the arguments", f'{_M0}<invoke><parameter name="place">Oslo</parameter></invoke>{_M1}', None, None, W),
    own("a parameter without a name is dropped", f'{_M0}<invoke name="weather"><parameter>x</parameter><parameter name="place">Oslo</parameter></invoke>{_M1}', None, None, W),
    own("JSON instead of parameters", f'{_M0}<invoke name="weather">{OSLO}</invoke>{_M1}', None, None, W),
    own("look-alikes in a value", f'{_M0}<invoke name="search"><parameter name="query"><invoke name="x"> <parameter> </invoke></parameter></invoke>{_M1}', None, None, ("search", '{"query": "<invoke name=\\"x\\"> <parameter> </invoke>"}')),
    own("null in a string stays", f'{_M0}<invoke name="weather"><parameter name="place">null</parameter></invoke>{_M1}', None, None, ("weather", '{"place": "null"}')),
]  # fmt: skip

_Q = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
_QWEN3 = [
    own("compact", '<tool_call>{"name":"weather","arguments":{"place":"Oslo"}}</tool_call>', None, None, ("weather", '{"place":"Oslo"}')),
    own("arguments first", '<tool_call>{"arguments": {"place": "Oslo"}, "name": "weather"}</tool_call>', None, None, W),
    own("parameters instead of arguments", '<tool_call>{"name": "weather", "parameters": {"place": "Oslo"}}</tool_call>', None, None, W),
    own("more keys", '<tool_call>{"id": {"a": [1]}, "name": "weather", "x": "}", "arguments": {"place": "Oslo"}, "y": 1}</tool_call>', None, None, W),
    own("no arguments key", '<tool_call>{"name": "ping"}</tool_call>', None, None, ("ping", "{}")),
    own("arguments in a string", '<tool_call>{"name": "weather", "arguments": "{\\"place\\": \\"Oslo\\"}"}</tool_call>', None, None, W),
    own("two objects in one tag", '<tool_call>{"name": "ping", "arguments": {}}\n{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>', None, None, ("ping", "{}"), W),
    own("a list of calls", '<tool_call>[{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {}}]</tool_call>', None, None, ("ping", "{}"), ("ping", "{}")),
    own("no end of the call", _Q.removesuffix("\n</tool_call>"), None, None, W),
    own("no end of the first call", f'<tool_call>{{"name": "ping", "arguments": {{}}}}\n{_Q}', None, None, ("ping", "{}"), W),
    own("the outer brace is missing", '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}</tool_call>B', "B", None, W),
    own("one brace too many", '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}}</tool_call>', None, None, W),
    own("cut in the arguments", '<tool_call>\n{"name": "weather", "arguments": {"place": "Os', None, None, ("weather", '{"place": "Os'), **CUT),
    own("an escaped name", '<tool_call>{"name": "we\\u0061ther", "arguments": {"place": "Oslo"}}</tool_call>', None, None, W),
    own("no name, by the arguments", '<tool_call>{"arguments": {"place": "Oslo"}}</tool_call>', None, None, W),
    own("malformed arguments", '<tool_call>{"name": "weather", "arguments": {place: Oslo}}</tool_call>', None, None, ("weather", "{place: Oslo}")),
    own("no JSON at all", "A<tool_call>weather in Oslo</tool_call>B", "ABweather in Oslo", None),
    own("broken next to a whole one", f"<tool_call>weather</tool_call>{_Q}", None, None, W),
    own("braces and quotes in a string", '<tool_call>{"name": "search", "arguments": {"query": "}}\\"]{\\\\"}}</tool_call>', None, None, ("search", '{"query": "}}\\"]{\\\\"}')),
]  # fmt: skip

_F = "<function=weather>\n<parameter=place>\nOslo\n</parameter>\n"
_QWEN3_CODER = [
    own("all in one line", "<tool_call><function=weather><parameter=place>Oslo</parameter></function></tool_call>", None, None, W),
    own("no outer tags", f"On it.\n{_F}</function>\nB", "On it.\n", None, W),
    own("no outer begin", f"{_F}</function>\n</tool_call>B", "B", None, W),
    own("no outer tags, undeclared: text", "Use <function=foo> here.", "Use <function=foo> here.", None),
    own("no outer tags, no name: text", "if x<function=3 then", "if x<function=3 then", None),
    own("no outer tags in think", f"Hm.{_F}</function>", None, "Hm.", W, state="reasoning"),
    own("two functions in one call", f"<tool_call>\n{_F}</function>\n{_F}</function>\n</tool_call>", None, None, W, W),
    own("no end of the function", f"<tool_call>\n{_F}</tool_call>B", "B", None, W),
    own("no end of a value", "<tool_call><function=weather><parameter=place>\nOslo\n</tool_call>", None, None, W),
    own("the model stops in the call", f"<tool_call>\n{_F}", None, None, W),
    own("cut behind a value", f"<tool_call>\n{_F}", None, None, ("weather", '{"place": "Oslo"'), **CUT),
    own("cut in a string", "<tool_call><function=weather><parameter=place>\nOs\n", None, None, ("weather", '{"place": "Os'), **CUT),
    own("cut in the header", "A<tool_call>\n<function=wea", "A", None, **CUT),
    own("line breaks of the value stay", "<tool_call><function=search><parameter=query>\n\n a\n\n</parameter></function></tool_call>", None, None, ("search", '{"query": "\\n a\\n"}')),
    own("look-alikes in a value", "<tool_call><function=search><parameter=query>\n<parameter=x> </function> <function=y>\n</parameter></function></tool_call>", None, None, ("search", '{"query": "<parameter=x> </function> <function=y>"}')),
    own("False as Python writes it", "<tool_call><function=weather><parameter=celsius>\nFalse\n</parameter></function></tool_call>", None, None, ("weather", '{"celsius": false}')),
    own("a number that is none", "<tool_call><function=weather><parameter=days>\n1,5\n</parameter></function></tool_call>", None, None, ("weather", '{"days": "1,5"}')),
    own("text inside a section", f"<tool_call> so: {_F}</function> and </tool_call>", None, None, W),
    own("blanks in the header", "<tool_call><function= weather ><parameter= place >Oslo</parameter></function></tool_call>", None, None, W),
]  # fmt: skip

_T, _A = "[TOOL_CALLS]", "[ARGS]"
_L = '{"name": "weather", "arguments": {"place": "Oslo"}}'
_MISTRAL = [
    own("the name before the arguments", f"{_T}weather{_A}{OSLO}", None, None, W),
    own("two of them", f"On it.{_T}ping{_A}{{}}{_T}weather{_A}{OSLO}", "On it.", None, ("ping", "{}"), W),
    own("with an id", f"{_T}weather[CALL_ID]abcdefghi{_A}{OSLO}", None, None, W),
    own("no marker before the arguments", f"{_T}weather{OSLO}", None, None, W),
    own("an id and no marker", f"{_T} weather [CALL_ID]abcdefghi\n{OSLO}\n", None, None, W),
    own("no list around one call", f"{_T} {_L}", None, None, W),
    own("compact", f'{_T}[{{"name":"weather","arguments":{{"place":"Oslo"}}}}]', None, None, ("weather", '{"place":"Oslo"}')),
    own("arguments first", f'{_T} [{{"arguments": {OSLO}, "name": "weather"}}]', None, None, W),
    own("ids inside", f'{_T} [{{"name": "weather", "arguments": {OSLO}, "id": "abcdefghi"}}]', None, None, W),
    own("text behind the list is dropped", f"{_T} [{_L}]\n\nDone.", None, None, W),
    own("no end of the list", f"{_T} [{_L}, {_L}", None, None, W, W),
    own("two lists", f"{_T} [{_L}]{_T} [{_L}]", None, None, W, W),
    own("cut in the arguments", f'{_T} [{{"name": "weather", "arguments": {{"pl', None, None, ("weather", '{"pl'), **CUT),
    own("cut in arguments alone", f'{_T}weather{_A}{{"pl', None, None, ("weather", '{"pl'), **CUT),
    own("no arguments", f"{_T}ping{_A}", None, None, ("ping", "{}")),
    own("a name and nothing else", f"A{_T}weather", "A", None),
    own("no JSON at all", f"A{_T} [{{weather}}]", "A{weather}]", None),
    own("malformed arguments", f"{_T}weather{_A}{{place: Oslo}}", None, None, ("weather", "{place: Oslo}")),
]  # fmt: skip

OWN: dict[str, list[Own]] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm45": _GLM,
    "glm47": _GLM,
    "minimax_m2": _MINIMAX_M2,
    "mistral": _MISTRAL,
    "qwen3": _QWEN3,
    "qwen3_coder": _QWEN3_CODER,
}
