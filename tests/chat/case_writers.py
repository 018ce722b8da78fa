"""How each family writes tool calls: after the checkpoints' chat templates, without a line of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """Strings as they are, all else as JSON."""
    return value if isinstance(value, str) else dumps(value)


@dataclass(frozen=True)
class Writer:
    """begin, end: of a section with calls in it. call: one call. between: what stands between two calls.

    is_json: arguments are written as JSON and come out as they are. tokens: the markers that are one token.
    has_end: something marks the end of calls, so that there may be text behind them.
    """

    begin: str
    end: str
    call: Callable[[str, Arguments], str]
    between: str
    is_json: bool
    tokens: Sequence[str]
    has_end: bool = True

    def section(self, *calls: tuple[str, Arguments]) -> str:
        return self.begin + self.between.join(self.call(name, arguments) for name, arguments in calls) + self.end


SB, SE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CB, SEP, CE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"


def _deepseek_v3(name: str, arguments: Arguments) -> str:
    return f"{CB}function{SEP}{name}\n```json\n{dumps(arguments)}\n```{CE}"


def _deepseek_v31(name: str, arguments: Arguments) -> str:
    return f"{CB}{name}{SEP}{dumps(arguments)}{CE}"


def _deepseek_v32(name: str, arguments: Arguments) -> str:
    parameters = "".join(
        f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{plain(value)}</{DSML}parameter>\n"
        for key, value in arguments.items()
    )
    return f'<{DSML}invoke name="{name}">\n{parameters}</{DSML}invoke>'


def _glm45(name: str, arguments: Arguments) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _glm47(name: str, arguments: Arguments) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{plain(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


def _minimax_m2(name: str, arguments: Arguments) -> str:
    parameters = "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{parameters}</invoke>'


def _qwen3(name: str, arguments: Arguments) -> str:
    return f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n</tool_call>'


def _qwen3_coder(name: str, arguments: Arguments) -> str:
    parameters = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _mistral(name: str, arguments: Arguments) -> str:
    return f'{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}'


_DEEPSEEK = (SB, SE, CB, SEP, CE)
_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_QWEN = ("<tool_call>", "</tool_call>")
_MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")

WRITERS = {
    "deepseek_v3": Writer(SB, SE, _deepseek_v3, "\n", True, _DEEPSEEK),
    "deepseek_v31": Writer(SB, SE, _deepseek_v31, "", True, _DEEPSEEK),
    "deepseek_v32": Writer(f"<{DSML}function_calls>\n", f"\n</{DSML}function_calls>", _deepseek_v32, "\n", False, ()),
    "glm45": Writer("", "", _glm45, "\n", False, _GLM),
    "glm47": Writer("", "", _glm47, "", False, _GLM),
    "minimax_m2": Writer("<minimax:tool_call>\n", "\n</minimax:tool_call>", _minimax_m2, "\n", False, _MINIMAX),
    "mistral": Writer("[TOOL_CALLS] [", "]", _mistral, ", ", True, _MISTRAL, False),
    "qwen3": Writer("", "", _qwen3, "\n", True, _QWEN),
    "qwen3_coder": Writer("", "", _qwen3_coder, "\n", False, _QWEN),
}
