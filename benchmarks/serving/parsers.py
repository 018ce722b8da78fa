"""How fast answers are read: tokens a second of CPU time, one call per token as the server makes them.

python benchmarks/serving/parsers.py [--tokens 300000] [--rounds 5]

Every family reads plain content, and the arguments of a call: a string of its schema for families with parameters,
JSON for the others. The best of the rounds, which alternate between families, is printed as one JSON line each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from proa.chat.chunkings import pieces_of
from proa.chat.output.events import Piece
from proa.chat.output.parser import FAMILIES
from proa.chat.output.tools import DeclaredTools

__all__ = ["main"]

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}
# What leads into the arguments of a call.
OPENINGS = {
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
    "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">',
    "glm45": "<tool_call>f<arg_key>x</arg_key><arg_value>",
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="x">',
    "mistral": "[TOOL_CALLS]f[ARGS]{",
    "qwen3": '<tool_call>{"name": "f", "arguments": {',
    "qwen3_coder": "<tool_call><function=f><parameter=x>\n",
}


def _seconds(family: str, opening: str, tokens: Sequence[Sequence[Piece]]) -> float:
    parser = FAMILIES[family].parser(DeclaredTools([TOOL]), in_reasoning=False)
    parser.push(pieces_of(opening, FAMILIES[family].markers))
    begin = time.thread_time()
    for token in tokens:
        parser.push(token)
    return time.thread_time() - begin


def main() -> int:
    """Run the command line; the exit status."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--tokens", type=int, default=300_000)
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    tokens: list[list[Piece]] = [[(" word", False)]] * arguments.tokens
    best: dict[tuple[str, str], float] = {}
    for _ in range(arguments.rounds):
        for family, opening in OPENINGS.items():
            for what, lead in (("content", ""), ("arguments", opening)):
                seconds = _seconds(family, lead, tokens)
                best[family, what] = min(seconds, best.get((family, what), seconds))
    for (family, what), seconds in best.items():
        line = {"bench": Path(__file__).stem, "family": family, "what": what}
        sys.stdout.write(
            json.dumps({**line, "million_tokens_per_s": round(arguments.tokens / seconds / 1e6, 2)}) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
