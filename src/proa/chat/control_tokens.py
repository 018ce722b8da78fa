"""Keeps text that a client wrote from turning into control tokens.

A chat template writes control tokens as text (`<|im_end|>`), and so may a user. To tell the two apart after rendering,
user text is marked before it: each control token name inside is wrapped in a nonce. After rendering, names that carry
no nonce are the template's own; the tokenizer knows control tokens only by unforgeable aliases, so a name that is not
translated is ordinary text. Text without control token names passes unchanged, whatever the template does with it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ControlTokens"]

_NONCE_DIGITS = 40


class ControlTokens:
    """The added tokens of one tokenizer, and their aliases.

    Args:
        special: names of special tokens, refused in everything a client sends.
        markers: names of further added tokens the chat template uses (`<think>`), refused in all but assistant turns,
            which quote what the model itself wrote.
    """

    def __init__(self, *, special: Iterable[str], markers: Iterable[str]) -> None:
        # Decimal digits pass unchanged through every filter a template may apply to user text (lower, tojson, escape).
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        self._special = frozenset(special)
        self._marked = self._special | frozenset(markers)
        self._aliases = {name: f"\ufdd0{self._nonce}.{index}\ufdd1" for index, name in enumerate(sorted(self._marked))}
        self._special_pattern = _any_of(self._special)
        self._marked_pattern = _any_of(self._marked)
        self._name_pattern = _any_of(self._aliases)
        nonce = re.escape(self._nonce)
        self._rendered_pattern = re.compile(
            f"{nonce}(?P<quoted>{self._marked_pattern.pattern}){nonce}|(?P<own>{self._name_pattern.pattern})|{nonce}"
        )
        self._open_ends = {name[:length] for name in self._marked for length in range(1, len(name))}
        self._longest_open_end = max((len(end) for end in self._open_ends), default=0)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of each added token -> the text by which the tokenizer knows it."""
        return self._aliases

    def mark(self, value: Any, *, assistant: bool = False) -> Any:
        """`value` (text, or lists and dicts of it) with control token names marked. Dict keys stay as they are."""
        if isinstance(value, str):
            return self._mark_text(value, assistant=assistant)
        if isinstance(value, dict):
            return {key: self.mark(item, assistant=assistant) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, assistant=assistant) for item in value]
        return value

    def _mark_text(self, text: str, *, assistant: bool) -> str:
        pattern = self._special_pattern if assistant else self._marked_pattern
        text = pattern.sub(rf"{self._nonce}\g<0>{self._nonce}", text)
        # Two strings side by side must not join into a name: an unfinished name at the end is closed with the nonce.
        body = text.rstrip()
        tail = body[-self._longest_open_end :] if self._longest_open_end else ""
        if any(tail[start:] in self._open_ends for start in range(len(tail))):
            return f"{body}{self._nonce}{text[len(body) :]}"
        return text

    def translate_rendered(self, text: str) -> str:
        """A rendered template in the tokenizer's spelling: own names become aliases, marks vanish."""

        def spell(match: re.Match[str]) -> str:
            if (own := match["own"]) is not None:
                return self._aliases[own]
            return match["quoted"] or ""

        return self._rendered_pattern.sub(spell, text)

    def translate(self, text: str) -> str:
        """A raw prompt in the tokenizer's spelling: every name counts as its token."""
        return self._name_pattern.sub(lambda match: self._aliases[match[0]], text)

    def unmark(self, text: str) -> str:
        """`text` without marks, as the template would have rendered it unprotected."""
        return text.replace(self._nonce, "")


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    # The longest name wins, as in the tokenizer's own search. `(?!)` matches nothing.
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)")
