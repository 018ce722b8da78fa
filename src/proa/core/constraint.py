"""What an answer may consist of, as the API process asks and the engine enforces it."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_GRAMMAR_CHARACTERS", "Constraint"]

# Of one grammar, schemas included.
MAX_GRAMMAR_CHARACTERS = 1 << 20


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar and when it holds. It waits, holds, may wait again, and once nothing more fits the answer is over.

    grammar: a Lark text as llguidance reads it, marker tokens by id (`<[163595]>`); empty: never holds.
    starts: a token that makes a waiting grammar hold -> the tokens it has then read. Empty: it holds from the first.
    pauses: tokens of the grammar after which it waits again.
    banned: tokens that are not allowed while it waits.
    must_start: no token that ends the answer is allowed before the grammar has held.
    """

    grammar: str = ""
    starts: dict[int, tuple[int, ...]] = {}
    pauses: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    must_start: bool = False
