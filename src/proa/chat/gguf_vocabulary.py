"""The byte-level BPE vocabulary inside a GGUF file, as the `tokenizer.json` that its model had.

Metadata (llama.cpp's converters write it): `tokenizer.ggml.model` "gpt2"; `.pre`, the name of a pre-tokenizer;
`.tokens`, texts in GPT-2's byte alphabet by id; `.token_type` (1 normal, 3 control, 4 user defined, 5 unused);
`.merges`, "left right" by rank; ids of special tokens; `tokenizer.chat_template`. A pre-tokenizer is one entry of
`PRETOKENIZERS`, named as there and cutting texts as the tokenizer.json of its models does. Kimi's models bring no
tokenizer.json: a file of theirs becomes the tokenizer that their tiktoken.model makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.chat.tokenizer import Tokenizer, bytes_of
from proa.core.errors import CheckpointError, UnsupportedError
from proa.core.names import shortened
from proa.gguf.header import GgufArray, MetadataValue

__all__ = ["PRETOKENIZERS", "GgufVocabulary", "Pretokenizer"]

_KEY = "tokenizer.ggml"
_MIN_TOKENS, _MAX_TOKENS = 256, 2_000_000
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_TOKEN_TYPES = range(1, 7)
_KIMI = "kimi-k2"
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# What texts are cut by; the names say whose tokenizer.json they are from.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = "|".join(
    [
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+",
        r"\p{N}",
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    ]
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CAMEL = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
)
_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_O200K = "|".join([*(f"{word}{_CONTRACTION}?" for word in _CAMEL), r"\p{N}{1,3}", _SLASHED])
_TEKKEN = "|".join([*_CAMEL, r"\p{N}", _SLASHED])
_PUNCTUATED_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_PUNCTUATED_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """Texts are cut by `patterns`, one after the other, before merges.

    digits: every digit stands alone. whole_tokens: a piece that is a token is taken as it is, whatever the merges.
    normal_form: a Unicode normal form applied beforehand.
    """

    patterns: tuple[str, ...]
    digits: bool = False
    whole_tokens: bool = False
    normal_form: str | None = None


_LIKE_LLAMA3 = Pretokenizer((_LLAMA3,), whole_tokens=True)
_LIKE_QWEN2 = Pretokenizer((_QWEN2,), normal_form="NFC")

PRETOKENIZERS: dict[str, Pretokenizer] = {
    "gpt-2": Pretokenizer((_GPT2,)),
    "smollm": Pretokenizer((_GPT2,), digits=True),
    "llama-bpe": _LIKE_LLAMA3,
    "llama3": _LIKE_LLAMA3,
    "llama-v3": _LIKE_LLAMA3,
    "glm4": Pretokenizer((_LLAMA3,)),
    "chatglm-bpe": Pretokenizer((_LLAMA3,)),
    "qwen2": _LIKE_QWEN2,
    "deepseek-r1-qwen": _LIKE_QWEN2,
    "qwen35": Pretokenizer((_QWEN35,), normal_form="NFC"),
    "deepseek-v3": Pretokenizer(_DEEPSEEK_V3),
    "gpt-4o": Pretokenizer((_O200K,)),
    "minimax-m2": Pretokenizer((_O200K,)),
    "tekken": Pretokenizer((_TEKKEN,), whole_tokens=True),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What a file says of its tokens: texts in GPT-2's byte alphabet and types, both by id; merges by rank.

    special_tokens: `bos_token` and its like. first: the token that raw texts begin with. template: for chats.
    """

    where: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[list[str]]
    special_tokens: dict[str, str]
    first: str | None
    template: str | None

    @staticmethod
    def read(metadata: Mapping[str, MetadataValue], where: str) -> GgufVocabulary | None:
        """The vocabulary in the metadata of the file `where`; None when it has none.

        Raises:
            CheckpointError: a damaged one, naming the key.
            UnsupportedError: not byte-level BPE, or a pre-tokenizer proa does not have.
        """
        if f"{_KEY}.tokens" not in metadata:
            return None
        if (model := metadata.get(f"{_KEY}.model")) != "gpt2":
            raise UnsupportedError(f"{where}: {_KEY}.model", "'gpt2', byte-level BPE", shortened(model))
        pre = _pretokenizer(metadata.get(f"{_KEY}.pre"), where)
        tokens = _texts(metadata, "tokens", where)
        if not _MIN_TOKENS <= len(tokens) <= _MAX_TOKENS or len(set(tokens)) != len(tokens):
            got = f"{len(tokens)}, {len(set(tokens))} of them distinct"
            raise CheckpointError(f"{where}: {_KEY}.tokens", f"{_MIN_TOKENS} to {_MAX_TOKENS} distinct tokens", got)
        special = _special_tokens(metadata, tokens, where)
        template = metadata.get("tokenizer.chat_template")
        return GgufVocabulary(
            where,
            pre,
            tokens,
            _token_types(metadata, len(tokens), where),
            _merges(metadata, tokens, where),
            special,
            _first_token(metadata, special, where),
            template if isinstance(template, str) else None,
        )

    def tokenizer(self, template: str = "") -> Tokenizer | TiktokenTokenizer:
        """The tokenizer. Added tokens named in the chat `template` are control tokens, as for Tokenizer.load.

        Raises:
            CheckpointError: tokens that no tokenizer can be made of.
        """
        return self._kimi() if self.pre == _KIMI else Tokenizer.from_definition(self.definition(), template=template)

    def definition(self) -> dict[str, Any]:
        """As `tokenizer.json` has it."""
        pre = PRETOKENIZERS[self.pre]
        ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        return {
            "version": "1.0",
            "added_tokens": [
                _added_token(token_id, self.tokens[token_id], is_special=kind == _CONTROL)
                for token_id, kind in enumerate(self.kinds)
                if kind in {_CONTROL, _USER_DEFINED}
            ],
            "normalizer": None if pre.normal_form is None else {"type": pre.normal_form},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _steps(pre)},
            "post_processor": None if self.first is None else _put_first(self.first, ids[self.first]),
            "decoder": _byte_level(),
            "model": {
                "type": "BPE",
                "byte_fallback": False,
                "fuse_unk": False,
                "ignore_merges": pre.whole_tokens,
                "vocab": ids,
                "merges": self.merges,
            },
        }

    def _kimi(self) -> TiktokenTokenizer:
        ranks = {bytes_of(token): rank for rank, token in enumerate(self._normal_tokens())}
        rest = range(len(ranks), len(self.tokens))
        control = {self.tokens[token_id]: token_id for token_id in rest}
        markers = {self.tokens[token_id] for token_id in rest if self.kinds[token_id] == _USER_DEFINED}
        return TiktokenTokenizer(ranks, control, markers)

    def _normal_tokens(self) -> list[str]:
        """Those before the first other one. CheckpointError unless all others stand behind them."""
        count = next((token_id for token_id, kind in enumerate(self.kinds) if kind != _NORMAL), len(self.kinds))
        if late := [token_id for token_id in range(count, len(self.kinds)) if self.kinds[token_id] == _NORMAL]:
            expected = "control tokens behind all others, as Kimi's are"
            raise CheckpointError(f"{self.where}: {_KEY}.token_type", expected, f"a normal token at {late[0]}")
        return self.tokens[:count]


def _pretokenizer(name: MetadataValue | None, where: str) -> str:
    if not isinstance(name, str) or (name not in PRETOKENIZERS and name != _KIMI):
        expected = f"a pre-tokenizer out of {', '.join([*PRETOKENIZERS, _KIMI])}"
        fix = "put the model's own tokenizer.json into its directory"
        raise UnsupportedError(f"{where}: {_KEY}.pre", expected, shortened(name), fix)
    return name


def _array(metadata: Mapping[str, MetadataValue], name: str, where: str) -> GgufArray:
    value = metadata.get(f"{_KEY}.{name}")
    if not isinstance(value, GgufArray):
        raise CheckpointError(f"{where}: {_KEY}.{name}", "an array", "none" if value is None else shortened(value))
    return value


def _texts(metadata: Mapping[str, MetadataValue], name: str, where: str) -> list[str]:
    values = _array(metadata, name, where).values()
    if isinstance(values, np.ndarray):
        raise CheckpointError(f"{where}: {_KEY}.{name}", "an array of strings", f"one of {values.dtype}")
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: {_KEY}.{name}", "strings in UTF-8", repr(error.object[:40])) from None


def _token_types(metadata: Mapping[str, MetadataValue], count: int, where: str) -> list[int]:
    values = _array(metadata, "token_type", where).values()
    is_numbers = isinstance(values, np.ndarray) and values.dtype.kind in "iu"
    kinds = [int(value) for value in values] if is_numbers else []
    if len(kinds) != count or any(kind not in _TOKEN_TYPES for kind in kinds):
        wrong = next((kind for kind in kinds if kind not in _TOKEN_TYPES), f"{len(values)} values")
        raise CheckpointError(f"{where}: {_KEY}.token_type", f"{count} numbers from 1 to 6", wrong)
    return kinds


def _merges(metadata: Mapping[str, MetadataValue], tokens: list[str], where: str) -> list[list[str]]:
    known = set(tokens)
    merges = [merge.split(" ") for merge in _texts(metadata, "merges", where)]
    for merge in merges:
        if len(merge) != 2 or not known >= {*merge, "".join(merge)}:
            expected = "two tokens that together are one"
            raise CheckpointError(f"{where}: {_KEY}.merges", expected, shortened(" ".join(merge)))
    return merges


def _special_tokens(metadata: Mapping[str, MetadataValue], tokens: list[str], where: str) -> dict[str, str]:
    special = {}
    for role, name in _SPECIAL_TOKENS.items():
        key = f"{_KEY}.{name}_token_id"
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{where}: {key}", f"an id below {len(tokens)}", shortened(token_id))
        special[role] = tokens[token_id]
    return special


def _first_token(metadata: Mapping[str, MetadataValue], special: Mapping[str, str], where: str) -> str | None:
    if metadata.get(f"{_KEY}.add_bos_token") is not True:
        return None
    if "bos_token" not in special:
        raise CheckpointError(f"{where}: {_KEY}.add_bos_token", "a bos_token_id with it", "none")
    return special["bos_token"]


def _put_first(token: str, token_id: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": special,
    }


def _steps(pre: Pretokenizer) -> list[dict[str, Any]]:
    digits = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    return [*digits, *cuts, _byte_level()]


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _added_token(token_id: int, content: str, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": is_special}
