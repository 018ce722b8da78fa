"""Grammars to matchers, over llguidance. A matcher says which tokens may come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarError", "Matcher", "TokenTable", "Vocabulary", "VocabularySource", "byte_table", "token_table"]

# Each lexer state takes one or two kB; the default allows 250 000.
_MAX_LEXER_STATES = 50_000
# Where only one text is possible every spelling of it is allowed; else llguidance would choose its tokens.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that went wrong while it was followed."""


class VocabularySource(Protocol):
    """What is asked of a tokenizer."""

    @property
    def control_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """tokens: the bytes of every id, b"" for one that stands for nothing. special: ids that are no text."""

    tokens: Sequence[bytes]
    special: Collection[int]


def token_table(tokenizer: VocabularySource, vocab_size: int) -> TokenTable:
    """The table of a model with `vocab_size` logits; O(vocabulary)."""
    special = frozenset(token_id for token_id in tokenizer.control_ids if token_id < vocab_size)
    return TokenTable([tokenizer.token_bytes(token_id) for token_id in range(vocab_size)], special)


def byte_table(vocab_size: int) -> TokenTable:
    """A stand-in for any vocabulary of this size: the bytes, and ids that stand for nothing."""
    tokens = [bytes([value]) for value in range(256)] + [
        f"<{token_id}>".encode() for token_id in range(256, vocab_size)
    ]
    return TokenTable(tokens, range(256, max(vocab_size, 257)))


class Vocabulary:
    """A vocabulary as the engine of grammars indexes it; takes seconds for large ones. Thread-safe."""

    def __init__(self, table: TokenTable, end_id: int) -> None:
        """`end_id`: any special token; grammars that may end allow it."""
        import llguidance

        self._llguidance = llguidance
        self.size = len(table.tokens)
        self.end_id = end_id
        wrapper = llguidance.TokenizerWrapper(_Table(table, end_id))
        self._tokenizer: LLTokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.size, eos_token=[end_id])
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, grammar: str) -> Matcher:
        """The matcher of a grammar at its beginning. Releases the GIL. GrammarError says what is wrong."""
        matcher = self._llguidance.LLMatcher(self._tokenizer, _OPTIONS + grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_message(matcher))
        return Matcher(matcher, self.size, self.end_id)


class _Table:
    """What llguidance reads a tokenizer from. It encodes text where it forces tokens, so never for us: bytes do."""

    def __init__(self, table: TokenTable, end_id: int) -> None:
        # llguidance writes a special token as the byte 0xFF and its name. One without a name would be that byte, and be
        # allowed, with the byte's own token, wherever a special token is.
        self.tokens = list(table.tokens)
        self.special_token_ids = sorted(i for i in {*table.special, end_id} if self.tokens[i])
        self.eos_token_id = end_id
        self.bos_token_id = None
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in special}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._ids]


class Matcher:
    """Follows one sequence through its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_id: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._end_id = end_id

    def copy(self) -> Matcher:
        """Another matcher in the same state."""
        return Matcher(self._matcher.deep_copy(), self._num_words * 32, self._end_id)

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the allowed tokens to `mask` [ceil(vocab / 32)]: bit t % 32 of word t // 32. GrammarError on faults.

        Tokens that end an answer are not among them: `may_end` says whether it may.
        """
        assert mask.shape == (self._num_words,) and mask.flags.c_contiguous, mask.shape
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_message(self._matcher))
        word, bit = divmod(self._end_id, 32)
        mask.view(np.uint32)[word] &= np.uint32(0xFFFFFFFF ^ (1 << bit))

    def take(self, token: int) -> None:
        """Go on by an allowed token; GrammarError for another one."""
        if not self._matcher.consume_token(token):
            raise GrammarError(_message(self._matcher))

    @property
    def may_end(self) -> bool:
        """Whether what was taken is a whole answer."""
        return bool(self._matcher.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether no further token is allowed."""
        return bool(self._matcher.is_stopped())


def _message(matcher: LLMatcher) -> str:
    """The first line of an error, without the grammar that llguidance quotes behind it."""
    lines = [line.strip() for line in matcher.get_error().split("\n") if line.strip()]
    kept = [line for line in lines if not line.startswith(("<non-verbose", "^")) and " | " not in line[:8]]
    return " ".join(kept)[:400]
