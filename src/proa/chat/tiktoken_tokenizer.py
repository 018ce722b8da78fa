"""Kimi's tokenizer from `tiktoken.model` and `tokenizer_config.json`; no code of the checkpoint runs."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proa.chat.control_tokens import ControlTokens
from proa.chat.detokenizer import Detokenizer
from proa.chat.encoded_texts import EncodedTexts
from proa.chat.output.events import Piece
from proa.core.errors import CheckpointError

if TYPE_CHECKING:
    import tiktoken

__all__ = ["TiktokenTokenizer"]

_NUM_RESERVED = 256  # ids behind the ranks, for control tokens
_MAX_RANKS = 1_000_000

# How text is cut before merges: a run of Han; a word with at most one leading mark, lower case after upper, maybe with
# an English contraction; three digits; punctuation; line ends; blanks.
_LETTER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Texts are cut there before anything else, as the reference does, so that huge ones have the same ids. It also keeps
# the pattern's work on a run of one kind bounded.
_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_MAX_RUN + 1},}}|\S{{{_MAX_RUN + 1},}}")


class TiktokenTokenizer:
    """Byte-level BPE over ranks, with control tokens behind them. Thread-safe; encoding releases the GIL.

    Control tokens are told apart by position, never by spelling: `encode_pieces` makes one only of a piece that says it
    is one, so a client's text never turns into control tokens.
    """

    def __init__(self, ranks: dict[bytes, int], control: dict[str, int], markers: Collection[str] = ()) -> None:
        """`ranks`: token bytes -> id, 0 .. n-1; `control`: name -> id, behind the ranks.

        `markers`: the names among `control` that are not special, see ControlTokens.
        """
        import tiktoken  # here, in the thread that loads, so that the API process is up without waiting for it

        self._encoding: tiktoken.Encoding = tiktoken.Encoding(
            "proa", pat_str=_SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=control
        )
        self._control = dict(control)
        self._markers = frozenset(markers)
        self._bytes = [b""] * (max([len(ranks) - 1, *control.values()]) + 1)
        for token, token_id in ranks.items():
            self._bytes[token_id] = token
        for name, token_id in control.items():
            self._bytes[token_id] = name.encode()
        self._names = {token_id: name for name, token_id in control.items()}
        self.vocab_size = len(self._bytes)
        self._texts = EncodedTexts(self._encode_ordinary)

    @staticmethod
    def load(model_path: Path) -> TiktokenTokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json` of a checkpoint directory.

        Raises:
            CheckpointError: a missing or damaged file, naming it and what is wrong.
        """
        ranks = _read_ranks(model_path / "tiktoken.model")
        return TiktokenTokenizer(ranks, *_read_control(model_path / "tokenizer_config.json", len(ranks)))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all control tokens."""
        return frozenset(self._names)

    @cached_property
    def control(self) -> ControlTokens:
        """What marks a client's text in a jinja template."""
        return ControlTokens(special=set(self._control) - self._markers, markers=self._markers)

    def encode_rendered(self, text: str) -> list[int]:
        """A rendered chat template whose user text was marked by `control.mark`."""
        return self.encode_pieces(self.control.rendered_pieces(text))

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that are never a part of a text; here those of all control tokens."""
        return self.special_ids

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """A rendered prompt: markers as their tokens, text as ordinary text whatever it spells.

        Raises:
            CheckpointError: a marker this tokenizer does not have.
        """
        ids: list[int] = []
        for text, is_marker in pieces:
            if not is_marker:
                ids += self._texts.encode(text)
            elif (token_id := self._control.get(text)) is not None:
                ids.append(token_id)
            else:
                raise CheckpointError("tokenizer", f"a control token {text!r}, which the prompt needs", "none")
        return ids

    def encode(self, text: str, *, with_control: bool = True, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """A raw text; `with_control`: names of control tokens in it count as these tokens.

        `add_special_tokens` is there for callers of any tokenizer: this one adds none.
        """
        if not with_control:
            return self._encode_ordinary(text)
        ids: list[int] = []
        for begin in range(0, len(text), _MAX_CHARACTERS):
            for part in _cut_long_runs(text[begin : begin + _MAX_CHARACTERS]):
                ids += self._encoding.encode(part, allowed_special="all")
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; empty for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """A token as text; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, name: str) -> int | None:
        """Id of a control token."""
        return self._control.get(name)

    def marker_name(self, token_id: int) -> str | None:
        """The name of a control token, None for every other one."""
        return self._names.get(token_id)

    def longest_token_bytes(self) -> int:
        """Most bytes that one token stands for. O(vocabulary)."""
        return max(map(len, self._bytes), default=1) or 1

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()

    def _encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = []
        for begin in range(0, len(text), _MAX_CHARACTERS):
            for part in _cut_long_runs(text[begin : begin + _MAX_CHARACTERS]):
                ids += self._encoding.encode_ordinary(part)
        return ids


def _cut_long_runs(text: str) -> Iterator[str]:
    """Parts in which no run of blanks, or of anything else, is longer than _MAX_RUN."""
    begin = 0
    for run in _LONG_RUN.finditer(text):
        for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Lines `base64 rank`, the ranks being 0 .. n-1 in any order."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError("tokenizer", f"a readable {path.name} in the model directory", str(error)) from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{path.name}: line {number}", "a token in base64 and its rank", repr(error)
            ) from error
    count = sum(1 for line in lines if line.strip())
    if not 256 <= count <= _MAX_RANKS or len(ranks) != count or set(ranks.values()) != set(range(count)):
        got = f"{count} lines, {len(ranks)} distinct tokens, ranks up to {max(ranks.values(), default=-1)}"
        raise CheckpointError(path.name, f"256 .. {_MAX_RANKS} tokens with the ranks 0, 1, 2, ...", got)
    return ranks


def _read_control(path: Path, num_ranks: int) -> tuple[dict[str, int], set[str]]:
    """Names of the ids behind the ranks, and those that are not special: a model writes them into its answers.

    They stand in `added_tokens_decoder`; the ids that do not are reserved tokens.
    """
    try:
        decoder = msgspec.json.decode(path.read_bytes()).get("added_tokens_decoder", {})
        given = {int(token_id): str(entry["content"]) for token_id, entry in decoder.items()}
        markers = {str(entry["content"]) for entry in decoder.values() if entry.get("special") is False}
    except (OSError, msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        expected = f"{path.name} with added_tokens_decoder in the model directory"
        raise CheckpointError("tokenizer", expected, repr(error)) from error
    ids = range(num_ranks, num_ranks + _NUM_RESERVED)
    if outside := [token_id for token_id in given if token_id not in ids]:
        raise CheckpointError(path.name, f"added tokens with ids {ids.start} .. {ids.stop - 1}", outside[0])
    control = {given.get(token_id, f"<|reserved_token_{token_id}|>"): token_id for token_id in ids}
    if len(control) != len(ids) or "" in control:
        raise CheckpointError(path.name, "added tokens with distinct names", "one name twice or an empty one")
    return control, markers
