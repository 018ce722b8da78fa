"""Replays recorded cases through the chat layer: `python -m proa.chat.replay --help`.

    --family NAME [--splits all] FILE    raw model output -> reasoning, content, tool calls
    --history FILE                       OpenAI messages -> the messages a Kimi prompt is written from
    --render FILE                        messages and tools -> prompt text
    --tokenizer DIR FILE                 text -> token ids

Cases are JSON, one a line. Every failure is printed as a difference; exit status 1 when there was one.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from proa.chat.chunkings import chunkings, pieces_of
from proa.chat.history import normalise_history
from proa.chat.kimi_prompt import STYLES, PromptOptions, prompt_text, render_prompt
from proa.chat.output.events import Answer, Event, Piece
from proa.chat.output.parser import OutputFamily, output_family
from proa.chat.output.tools import DeclaredTools
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.core.errors import ProaError

__all__ = ["main"]

# What is checked in a case: (what was run, expected, got); nothing more after a difference.
Checks = Iterator[tuple[str, Any, Any]]
_Case = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = _parse(arguments)
    try:
        check = _check_of(options)
        cases = _read(options.file)
    except (ProaError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = 0
    for case in cases:
        if (difference := _first_difference(check, case)) is not None:
            failed += 1
            sys.stdout.write(f"FAILED {case.get('id', '?')}: {case.get('about', '')}\n{difference}\n")
    sys.stdout.write(f"{len(cases) - failed} passed, {failed} failed\n")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proa.chat.replay", description=__doc__.split("\n")[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--family", metavar="NAME", help="parse model output as this family writes it (e.g. kimi_k2)")
    kind.add_argument("--history", action="store_true", help="normalise conversations")
    kind.add_argument("--render", action="store_true", help="write prompts")
    kind.add_argument("--tokenizer", type=Path, metavar="DIR", help="encode texts with the tokenizer of this directory")
    parser.add_argument("--splits", choices=["none", "all"], default="none", help="cut the output in every way")
    parser.add_argument("--style", choices=sorted(STYLES), default="kimi-k2.6", help="of --render (%(default)s)")
    parser.add_argument("file", type=Path, metavar="FILE", help="cases, one JSON object a line")
    return parser.parse_args(arguments)


def _check_of(options: argparse.Namespace) -> Callable[[_Case], Checks]:
    if options.family is not None:
        family = output_family(options.family)
        return lambda case: _check_output(case, family, every_split=options.splits == "all")
    if options.history:
        return _check_history
    if options.render:
        return lambda case: _check_prompt(case, options.style)
    tokenizer = TiktokenTokenizer.load(options.tokenizer)
    return lambda case: _check_tokens(case, tokenizer)


def _read(path: Path) -> list[_Case]:
    cases = [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    if not cases or not all(isinstance(case, dict) for case in cases):
        raise ValueError(f"[{path.name}] expected cases as JSON objects, one a line, got {len(cases)} lines")
    return cases


def _first_difference(check: Callable[[_Case], Checks], case: _Case) -> str | None:
    try:
        for name, expected, got in check(case):
            if expected != got:
                return f"  {name}\n{_difference(expected, got)}"
    except (ProaError, KeyError, TypeError, ValueError) as error:
        return f"  {type(error).__name__}: {error}"
    return None


def _difference(expected: Any, got: Any) -> str:
    return "\n".join(difflib.unified_diff(_lines(expected), _lines(got), "expected", "got", lineterm="", n=2))


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        return [repr(line) for line in value.splitlines(keepends=True)]
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode().split("\n")


def _check_output(case: _Case, family: OutputFamily, *, every_split: bool) -> Checks:
    ordinary = case.get("ordinary", ())
    pieces = pieces_of(case["text"], family.markers, ordinary)
    for name, chunks in chunkings(pieces, every=every_split):
        yield f"tokens, {name}", case["expect"], _answer(case, family, chunks, is_text=False)
    if ordinary:  # a text cannot say that these are no markers
        return
    for name, chunks in chunkings([(case["text"], False)], every=every_split):
        yield f"text, {name}", case["expect"], _answer(case, family, chunks, is_text=True)


def _answer(case: _Case, family: OutputFamily, chunks: Sequence[Sequence[Piece]], *, is_text: bool) -> _Case:
    parser = family.parser(
        DeclaredTools(case.get("tools")),
        in_reasoning=case["state"] == "reasoning",
        history_calls=case.get("history_calls", 0),
        no_calls=case.get("tool_choice") == "none",
    )
    events: list[Event] = []
    for chunk in chunks:
        events += parser.push_text("".join(text for text, _ in chunk)) if is_text else parser.push(chunk)
    answer = Answer.of(events + parser.finish(is_cut=case["finish"] == "length"))
    # Ids that do not follow from the case are not expected in it.
    has_ids = all("id" in call for call in case["expect"]["calls"])
    return {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "calls": [
            ({"id": call.id} if has_ids else {}) | {"name": call.name, "arguments": call.arguments}
            for call in answer.calls
        ],
        "finish_reason": answer.finish_reason(case["finish"]),
    }


def _check_history(case: _Case) -> Checks:
    normal = normalise_history(case["messages"])
    yield "messages", case["expect"], {"messages": normal.messages, "next_index": normal.next_index}


def _check_prompt(case: _Case, style: str) -> Checks:
    options = PromptOptions(**case.get("kwargs", {}))
    normal = normalise_history(case["messages"])
    pieces = render_prompt(STYLES[style], normal.messages, case.get("tools"), options)
    yield "prompt", case["rendered"], prompt_text(pieces)


def _check_tokens(case: _Case, tokenizer: TiktokenTokenizer) -> Checks:
    ids = tokenizer.encode(case["text"], with_control=case["special"])
    yield "ids", case["ids"], ids
    yield "decoded", case["text"], tokenizer.decode(ids)


if __name__ == "__main__":
    sys.exit(main())
