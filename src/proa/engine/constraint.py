"""The constraint of one sequence: which tokens may come next, as a bitmask for the sampler."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from proa.chat.grammar.matcher import Matcher
from proa.core.constraint import Constraint

__all__ = ["SequenceConstraint", "mask_words"]


class _Phase(Enum):
    WAITING = auto()
    HOLDING = auto()
    OVER = auto()


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


class SequenceConstraint:
    """Follows the tokens of one sequence. Its faults are GrammarError and end that sequence."""

    def __init__(
        self, constraint: Constraint, matcher: Matcher | None, *, end_ids: Collection[int], vocab_size: int
    ) -> None:
        """`matcher`: at the beginning of the grammar, None without one. `end_ids`: the tokens that end the answer."""
        self._constraint = constraint
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = [token for token in end_ids if 0 <= token < vocab_size]
        self._pauses = frozenset(constraint.pauses)
        self._phase = _Phase.HOLDING if matcher is not None and not constraint.starts else _Phase.WAITING
        banned = {*constraint.banned, *(self._end_ids if constraint.must_start else ())}
        self._waiting_mask = _all_but(banned, vocab_size) if banned else None

    @property
    def is_over(self) -> bool:
        """Whether the answer ends here because nothing more fits."""
        return self._phase is _Phase.OVER

    @property
    def is_free(self) -> bool:
        """Whether every token may come next."""
        return self._phase is _Phase.WAITING and self._waiting_mask is None

    def fill(self, mask: NDArray[np.int32]) -> bool:
        """Write the allowed tokens to `mask` [ceil(vocab / 32)]; False, and nothing written, when all are."""
        if self.is_free:
            return False
        if self._phase is _Phase.WAITING:
            assert self._waiting_mask is not None
            mask[:] = self._waiting_mask
            return True
        assert self._phase is _Phase.HOLDING and self._matcher is not None
        self._matcher.fill(mask)
        if self._end_ids and self._matcher.may_end:
            _allow(mask, self._end_ids)
        return True

    def take(self, token: int) -> None:
        """Go on by a generated token that does not end the answer."""
        if self._matcher is None:
            return
        if self._phase is _Phase.WAITING:
            read = self._constraint.starts.get(token)
            if read is None:
                return
            for begun in read:
                self._matcher.take(begun)
            self._phase = _Phase.HOLDING
        else:
            self._matcher.take(token)
            if token in self._pauses:
                self._phase = _Phase.WAITING
        if self._matcher.must_end:
            self._phase = _Phase.OVER


def _all_but(banned: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    mask = np.full(mask_words(vocab_size), -1, dtype=np.int32)
    words = mask.view(np.uint32)
    for token in banned:
        words[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
    return mask


def _allow(mask: NDArray[np.int32], tokens: Collection[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
