"""Everything a request does to its logits before a token is drawn: bias, minimum length, penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from proa.core.sampling_params import SamplingParams

__all__ = ["LogitAdjuster"]


class LogitAdjuster:
    """Order as in vLLM: min_tokens mask, logit_bias, repetition penalty, frequency and presence penalty.

    For token t with logit x and count c among the generated tokens:
        x += bias[t]
        x = x / r if x > 0 else x * r        when t is in prompt or answer, r = repetition_penalty
        x -= frequency_penalty * c + presence_penalty * (c > 0)
    """

    def __init__(
        self, params: SamplingParams, *, prompt: Sequence[int], end_ids: Iterable[int], vocab_size: int
    ) -> None:
        self._min_tokens = params.min_tokens
        self._end_ids = np.array(sorted(t for t in set(end_ids) if 0 <= t < vocab_size), dtype=np.int64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias))
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._penalizes = bool(
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self._counts = _TokenCounts(prompt if params.repetition_penalty != 1.0 else ())

    def observe(self, token: int) -> None:
        """Count one generated token."""
        if self._penalizes:
            self._counts.add(token)

    def changes(self, num_generated: int) -> bool:
        """Whether `apply` would do anything for the token after `num_generated` others."""
        return bool(self._penalizes or self._bias_ids.size) or (
            num_generated < self._min_tokens and self._end_ids.size > 0
        )

    def apply(self, logits: NDArray[np.float32], num_generated: int) -> None:
        """Change `logits` [vocab] in place."""
        if self._bias_ids.size:
            logits[self._bias_ids] += self._bias
        if num_generated < self._min_tokens:
            logits[self._end_ids] = -np.inf
        ids, counts = self._counts.arrays()
        if not self._penalizes or not ids.size:
            return
        values = logits[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        logits[ids] = values


class _TokenCounts:
    """Distinct token ids and how often each was generated, in arrays that grow by doubling."""

    def __init__(self, known: Sequence[int]) -> None:
        """`known` tokens are listed with a count of 0."""
        self._index = {token: slot for slot, token in enumerate(dict.fromkeys(known))}
        spare = np.zeros(max(64, len(self._index)), dtype=np.int64)
        self._ids = np.concatenate([np.fromiter(self._index, dtype=np.int64, count=len(self._index)), spare])
        self._counts = np.zeros(self._ids.size, dtype=np.float32)

    def add(self, token: int) -> None:
        slot = self._index.setdefault(token, len(self._index))
        if slot == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1.0

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        size = len(self._index)
        return self._ids[:size], self._counts[:size]
