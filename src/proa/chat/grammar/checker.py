"""Compiles grammars of clients in a process that may be lost: `python -m proa.chat.grammar.checker`.

Requests come on standard input and are answered in order on standard output, each a length (4 bytes, little endian) and
a msgpack struct. A grammar that takes too long, too much memory or too deep a stack ends the process.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
import numpy as np

from proa.chat.grammar.check_messages import CPU_SECONDS, CheckReply, CheckRequest, frame
from proa.chat.grammar.matcher import GrammarError, Vocabulary, byte_table

__all__ = ["main"]

_MEMORY_BYTES = 2 << 30
# The vocabulary here is that of bytes: any token of a grammar is as good as another one.
_TOKEN_ID = re.compile(r"<\[[0-9]+\]>")
_VOCAB_SIZE = 258


def check(vocabulary: Vocabulary, request: CheckRequest) -> CheckReply:
    """Compile a grammar and find its first tokens."""
    try:
        grammar = _from_gbnf(request.grammar) if request.is_ebnf else request.grammar
        matcher = vocabulary.compile(_TOKEN_ID.sub(f"<[{vocabulary.end_id - 1}]>", grammar))
        mask = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
        matcher.fill(mask)
    except GrammarError as error:
        return CheckReply(error=_plain(str(error)))
    if not mask.any() and not matcher.may_end:
        return CheckReply(error="no text fits it")
    return CheckReply(grammar=grammar if request.is_ebnf else "")


def _plain(message: str) -> str:
    # Of a grammar or a state without any continuation; the engine says no more.
    return "no text fits it" if message.startswith("NoExtension") else message


def _from_gbnf(text: str) -> str:
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError as error:
        raise GrammarError("nested too deeply") from error
    except Exception as error:
        # The converter has errors of its own, and raises plain exceptions too.
        raise GrammarError(str(error)[:200] or type(error).__name__) from error


def serve(vocabulary: Vocabulary, source: BinaryIO, target: BinaryIO) -> None:
    """Answer until the input ends."""
    while len(header := source.read(4)) == 4:
        request = msgspec.msgpack.decode(source.read(int.from_bytes(header, "little")), type=CheckRequest)
        # CPU time, whatever else the machine does; the signal ends the process even inside native code.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = check(vocabulary, request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        target.write(frame(reply))
        target.flush()


def main() -> None:
    """Run until standard input closes."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(Vocabulary(byte_table(_VOCAB_SIZE), _VOCAB_SIZE - 1), sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
