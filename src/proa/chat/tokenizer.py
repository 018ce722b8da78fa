"""Text to token ids and back, over a checkpoint's `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from proa.chat.control_tokens import ControlTokens
from proa.chat.detokenizer import Detokenizer
from proa.core.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer", "bytes_of"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A loaded `tokenizer.json`. Thread-safe; encoding releases the GIL.

    Control tokens are known to the underlying tokenizer only by the aliases of `control`, so plain text never encodes
    to one of them unless `encode` or `ControlTokens.translate_rendered` says so.
    """

    def __init__(self, backend: tokenizers.Tokenizer, definition: dict[str, Any], control: ControlTokens) -> None:
        self._backend = backend
        self.control = control
        self._added = {int(token["id"]): str(token["content"]) for token in definition["added_tokens"]}
        self.special_ids = frozenset(int(token["id"]) for token in definition["added_tokens"] if token["special"])
        # Ids that are never a part of a text. Runs of blanks are added tokens in some vocabularies, and text.
        self.control_ids = frozenset(token_id for token_id, name in self._added.items() if name.strip())
        self._to_bytes = _bytes_of_token(definition.get("decoder"))
        self.leading_blanks = _leading_blanks(definition.get("decoder"))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @staticmethod
    def load(model_path: Path, *, template: str = "") -> Tokenizer:
        """Read `model_path`/tokenizer.json. Added tokens named in the chat `template` are control tokens too.

        Raises:
            CheckpointError: missing or damaged file.
            UnsupportedError: a decoder proa does not have.
        """
        path = model_path / "tokenizer.json"
        try:
            definition = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError("tokenizer", f"a readable {path.name} in the model directory", str(error)) from error
        return Tokenizer.from_definition(definition, template=template)

    @staticmethod
    def from_definition(definition: dict[str, Any], *, template: str = "") -> Tokenizer:
        """A tokenizer from a parsed `tokenizer.json`; errors as for `load`."""
        import tokenizers  # here, in the thread that loads, so that the API process is up without waiting for it

        try:
            added = [dict(token) for token in definition["added_tokens"]]
            control = _control_tokens(added, template)
            backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(_with_aliases(definition, control)).decode())
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("tokenizer.json", "a Hugging Face tokenizer", repr(error)) from error
        except Exception as error:
            # The Rust extension raises plain Exception; anything narrower is handled above.
            if type(error) is not Exception:
                raise
            raise CheckpointError("tokenizer.json", "a Hugging Face tokenizer", str(error)) from error
        for token in added:
            name = control.aliases.get(token["content"], token["content"])
            if (found := backend.token_to_id(name)) != token["id"]:
                raise CheckpointError("tokenizer.json", f"added token {token['content']!r} at id {token['id']}", found)
        backend.no_truncation()
        backend.no_padding()
        return Tokenizer(backend, {**definition, "added_tokens": added}, control)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt, in which the names of added tokens count as these tokens."""
        return self._encode(self.control.translate(text), add_special_tokens=add_special_tokens)

    def encode_rendered(self, text: str) -> list[int]:
        """A rendered chat template whose user text was marked by `control.mark`."""
        return self._encode(self.control.translate_rendered(text), add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call is the one that releases the GIL.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; empty for an id outside the vocabulary."""
        if (name := self._added.get(token_id)) is not None:
            return self._to_bytes(name)
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """The token's own spelling in the vocabulary (what `/tokenize` shows)."""
        if (name := self._added.get(token_id)) is not None:
            return name
        return self._backend.id_to_token(token_id) or ""

    def token_id(self, name: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(self.control.aliases.get(name, name))
        return found

    def longest_token_bytes(self) -> int:
        """Most bytes that one token stands for. O(vocabulary)."""
        return max((len(self.token_bytes(token_id)) for token_id in range(self.vocab_size)), default=1) or 1

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        text = "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()
        blanks = len(text) - len(text.lstrip(" "))
        return text[min(blanks, self.leading_blanks) :]


def _control_tokens(added: list[dict[str, Any]], template: str) -> ControlTokens:
    special = {token["content"] for token in added if token["special"]}
    # Blank runs are added tokens in some vocabularies and stand in every template: they are ordinary text.
    markers = {token["content"] for token in added if token["content"].strip() and token["content"] in template}
    return ControlTokens(special=special, markers=markers - special)


def _with_aliases(definition: dict[str, Any], control: ControlTokens) -> dict[str, Any]:
    """The definition with every control token renamed to its alias, in the vocabulary too."""
    aliases = control.aliases
    model = dict(definition["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(token, token): token_id for token, token_id in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(token, token), score] for token, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "content": aliases.get(token["content"], token["content"])} for token in definition["added_tokens"]
    ]
    return {**definition, "model": model, "added_tokens": added}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 keeps its code point, the rest follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def bytes_of(token: str) -> bytes:
    """The bytes of a token in GPT-2's byte alphabet; a token outside of it stands for its own text."""
    values = [_BYTE_LEVEL.get(character, -1) for character in token]
    return token.encode() if -1 in values else bytes(values)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _bytes_of_token(decoder: Any) -> Callable[[str], bytes]:
    kinds = {str(step.get("type")) for step in _decoder_steps(decoder)}
    if "ByteLevel" in kinds:
        return bytes_of
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"ByteFallback", "Metaspace"}:

        def sentence_piece(token: str) -> bytes:
            if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
                return bytes([int(match[1], 16)])
            return token.replace("▁", " ").encode()

        return sentence_piece
    raise UnsupportedError("tokenizer.json", "a ByteLevel, ByteFallback or Metaspace decoder", sorted(kinds) or "none")


def _leading_blanks(decoder: Any) -> int:
    """How many blanks at the very start of a text the decoder drops (SentencePiece's dummy prefix)."""
    for step in _decoder_steps(decoder):
        if step.get("type") == "Strip" and step.get("content") == " ":
            return int(step.get("start", 0))
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return 1
    return 0
