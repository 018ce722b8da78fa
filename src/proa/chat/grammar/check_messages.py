"""What the API process and the process that compiles grammars say to each other; imported by both, so nothing heavy."""

from __future__ import annotations

import msgspec

__all__ = ["CPU_SECONDS", "CheckReply", "CheckRequest", "frame"]

CPU_SECONDS = 2.0  # that a grammar may take


class CheckRequest(msgspec.Struct, frozen=True):
    """A grammar to compile. is_ebnf: it may be written in the GBNF dialect (`root ::= ...`)."""

    grammar: str
    is_ebnf: bool = False


class CheckReply(msgspec.Struct, frozen=True):
    """error: what is wrong with it, else empty. grammar: the Lark text of one that may be GBNF, else empty."""

    error: str = ""
    grammar: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body
