"""Writing and tokenizing a long conversation for Kimi, at first and each time it has grown by a message.

    python benchmarks/serving/prompts.py TOKENIZER_DIR [--tokens 131072] [--rounds 5]

TOKENIZER_DIR holds tiktoken.model and tokenizer_config.json. The conversation is an agent's: calls and their results
of about 6000 characters, the project's own source. Prints a JSON line: milliseconds of the thread's CPU time, best of
rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from proa.chat.dialect import ChatTurn, KimiDialect
from proa.chat.kimi_prompt import STYLES
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

SOURCE = Path(__file__).resolve().parents[2] / "src"
RESULT_CHARACTERS = 6000
TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def conversation(num_tokens: int) -> list[dict[str, Any]]:
    """About `num_tokens` of messages, at four characters a token."""
    texts = [path.read_text()[:RESULT_CHARACTERS] for path in sorted(SOURCE.rglob("*.py"))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the bug."}]
    characters = index = 0
    while characters < 4.2 * num_tokens:
        text = f"{index}\n{texts[index % len(texts)]}"
        function = {"name": "read", "arguments": json.dumps({"path": f"{index}.py"})}
        calls = [{"id": f"call_{index}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "reasoning_content": "Next file.", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{index}", "content": text})
        characters += len(text)
        index += 1
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    messages = conversation(options.tokens)
    first, grown, count = [], [], 0
    for number in range(options.rounds):
        dialect = KimiDialect(TiktokenTokenizer.load(options.tokenizer), STYLES["kimi-k2-thinking"])
        for times, added in ((first, []), (grown, [{"role": "user", "content": f"{number}: " + "and now? " * 200}])):
            turn = ChatTurn([*messages, *added], [TOOL])
            start = time.thread_time()
            count = len(dialect.prompt(turn, lambda _: None).token_ids)
            times.append((time.thread_time() - start) * 1e3)
    line = {"bench": Path(__file__).stem, "tokens": count, "messages": len(messages)}
    line |= {"first_ms": round(min(first), 1), "grown_ms": round(min(grown), 1)}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
