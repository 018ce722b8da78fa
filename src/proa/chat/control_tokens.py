"""Keeps text that a client wrote from turning into control tokens.

A chat template writes control tokens as text (`<|im_end|>`), and so may a user. To tell the two apart after rendering,
user text is marked before it: each control token name inside is put between two nonces. After rendering, names that
stand free are the template's own; the tokenizer knows control tokens only by unforgeable aliases, so a name that is not
translated is ordinary text. Text without control token names passes unchanged, whatever the template does with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from proa.chat.name_scanner import NameScanner
from proa.chat.output.events import Piece

__all__ = ["ControlTokens"]

_ALIAS_BEGIN, _ALIAS_END = "\ufdd0", "\ufdd1"


class ControlTokens:
    """The control tokens of one tokenizer, and their aliases.

    Args:
        special: names of special tokens, refused in everything a client sends.
        markers: names of further added tokens the chat template uses (`<think>`), refused in all but assistant turns,
            which quote what the model itself wrote.
    """

    def __init__(self, *, special: Iterable[str], markers: Iterable[str]) -> None:
        special = frozenset(special)
        names = special | frozenset(markers)
        # Around a name, and after text that could be the beginning of one.
        self._open, self._close, self._break = _nonce(), _nonce(), _nonce()
        self._aliases = {name: f"{_ALIAS_BEGIN}{_nonce()}{_ALIAS_END}" for name in names}
        self._by_alias = {alias: name for name, alias in self._aliases.items()}
        self._special = NameScanner(special)
        self._names = NameScanner(names)
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of each control token -> the text by which the tokenizer knows it."""
        return self._aliases

    def mark(self, value: Any, *, assistant: bool = False) -> Any:
        """`value` (text, or lists and dicts of it) with control token names marked, keys too."""
        if isinstance(value, str):
            return self._mark_text(value, assistant=assistant)
        if isinstance(value, dict):
            marked = {key: self.mark(item, assistant=assistant) for key, item in value.items()}
            return {self._mark_key(key, assistant=assistant): item for key, item in marked.items()}
        if isinstance(value, list):
            return [self.mark(item, assistant=assistant) for item in value]
        return value

    def _mark_key(self, key: Any, *, assistant: bool) -> Any:
        return self._mark_text(key, assistant=assistant) if isinstance(key, str) else key

    def _mark_text(self, text: str, *, assistant: bool) -> str:
        scanner = self._special if assistant else self._names
        text = scanner.replace(text, lambda name: f"{self._open}{name}{self._close}")
        # Two strings side by side must not join into a name.
        body = text.rstrip()
        tail = body[len(body) - self._longest_beginning :] if self._longest_beginning < len(body) else body
        if any(tail[start:] in self._beginnings for start in range(len(tail))):
            return f"{body}{self._break}{text[len(body) :]}"
        return text

    def translate_rendered(self, text: str) -> str:
        """A rendered template in the tokenizer's spelling: own names become aliases, marks vanish."""
        first, *others = text.split(self._open)
        pieces = [self._translate_unquoted(first)]
        for part in others:
            quoted, close, rest = part.partition(self._close)
            if close and quoted in self._names:
                pieces += [quoted, self._translate_unquoted(rest)]
            else:
                # The template cut the name or its marks apart.
                pieces.append(self._translate_unquoted(part))
        return "".join(pieces)

    def rendered_pieces(self, text: str) -> list[Piece]:
        """A rendered template as text and control tokens, for tokenizers that take these apart."""
        first, *others = self.translate_rendered(text).split(_ALIAS_BEGIN)
        pieces = [(first, False)]
        for part in others:
            nonce, end, rest = part.partition(_ALIAS_END)
            name = self._by_alias.get(f"{_ALIAS_BEGIN}{nonce}{end}")
            # The characters around an alias may as well stand in a client's text.
            pieces += [(_ALIAS_BEGIN + part, False)] if name is None else [(name, True), (rest, False)]
        return [piece for piece in pieces if piece[0]]

    def _translate_unquoted(self, text: str) -> str:
        # Pieces are translated one by one: what a mark separated does not join.
        pieces = text.replace(self._close, self._break).split(self._break)
        return "".join([self.translate(piece) for piece in pieces])

    def translate(self, text: str) -> str:
        """A raw prompt in the tokenizer's spelling: every name counts as its token."""
        return self._names.replace(text, self._aliases.__getitem__)

    def unmark(self, text: str) -> str:
        """`text` without marks, as the template would have rendered it unprotected."""
        for nonce in (self._open, self._close, self._break):
            text = text.replace(nonce, "")
        return text


def _nonce() -> str:
    # Decimal digits pass unchanged through every filter a template may apply to user text (lower, tojson, escape).
    return "".join(secrets.choice("0123456789") for _ in range(40))
