"""Draws one token per row of logits. Each row is treated alone, so no row depends on the batch around it.

Order: LogitAdjuster, bitmask of allowed tokens, temperature, min_p, top_k, top_p, draw. Log-probabilities are those of
the raw logits (log-softmax before any of it), as OpenAI's API and vLLM report them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proa.core.sampling_params import SamplingParams
from proa.engine.logit_adjust import LogitAdjuster
from proa.engine.random_numbers import uniform
from proa.ipc.messages import TokenLogprob

__all__ = ["GREEDY_TEMPERATURE", "Draw", "LogitsError", "draw", "largest"]

# Below this the softmax is a step function within float32; vLLM's limit too.
GREEDY_TEMPERATURE = 1e-5
# Candidates are looked for among this many largest logits, then among all.
_FIRST_CANDIDATES = 2048
# Running sums are taken in chunks of this many weights.
_CHUNK = 256

_Row = NDArray[np.float32]


class LogitsError(Exception):
    """The model gave a row nothing can be drawn from."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token and, when asked for, its log-probability with alternatives."""

    token: int
    logprob: TokenLogprob | None


def draw(
    logits: _Row,
    params: SamplingParams,
    adjuster: LogitAdjuster,
    *,
    seed: int,
    position: int,
    index: int,
    mask: NDArray[np.int32] | None = None,
) -> Draw:
    """Choose the token at `position` of the sequence, the `index`-th one generated, from `logits` [vocab] (unchanged).

    mask: [ceil(vocab / 32)], bit t % 32 of word t // 32 allows token t; None allows all.

    Temperatures under 1e-5 take the largest logit, the lowest id among equals.

    Raises:
        LogitsError: a logit is NaN or +inf, or all are -inf.
    """
    raw = logits
    if adjuster.changes(index):
        logits = raw.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            adjuster.apply(logits, index)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), count=logits.size, bitorder="little").view(np.bool_)
        logits = np.where(allowed, logits, np.float32(-np.inf))
    best = int(np.argmax(logits))  # the first NaN when there is one
    if not np.isfinite(logits[best]):
        raise LogitsError(f"the largest of {logits.size} logits is {logits[best]}, no token can be drawn")
    if params.temperature < GREEDY_TEMPERATURE or params.top_k == 1:
        token = best
    else:
        token = _sample(logits, logits[best], params, uniform(seed, position))
    return Draw(token, None if params.logprobs is None else _logprob(raw, token, params.logprobs))


def largest(values: _Row, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, largest first, lower index first among equals."""
    count = min(count, values.size)
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    cutoff = np.partition(values, values.size - count)[values.size - count]
    indices = np.flatnonzero(values >= cutoff)
    return indices[np.argsort(-values[indices], kind="stable")][:count]


def _sample(logits: _Row, peak: np.float32, params: SamplingParams, number: float) -> int:
    """Token at which the running sum of the probabilities left by min_p, top_k and top_p passes `number` in [0, 1)."""
    if params.top_p >= 1.0 and params.top_k <= 0 and params.min_p <= 0.0:
        return _pick(_softmax(logits, peak, params), number)
    values, weights = _candidates(logits, peak, params)
    rank = _pick(weights, number)
    same = np.flatnonzero(logits == values[rank])
    return int(same[rank - np.count_nonzero(values > values[rank])])


def _candidates(logits: _Row, peak: np.float32, params: SamplingParams) -> tuple[_Row, _Row]:
    """Logits and weights of the tokens min_p, top_k and top_p leave, largest first.

    Sorting a few thousand of the largest logits suffices unless the distribution is flat. Among equal logits at the
    end, lower token ids are the ones kept: `_sample` counts them from the lowest.
    """
    size = logits.size
    limited = 0 < params.top_k < size or params.min_p > 0.0
    # top_p is of what min_p and top_k leave; without them, of everything.
    mass = None if limited or params.top_p >= 1.0 else params.top_p * float(_softmax(logits, peak, params).sum())
    count = min(params.top_k if params.top_k > 0 else _FIRST_CANDIDATES, size)
    while True:
        some = logits if count == size else np.partition(logits, size - count)[size - count :]
        values = np.ascontiguousarray(np.sort(some)[::-1])
        weights = _softmax(values, peak, params)
        # The peak's own weight is exactly 1, so min_p is a bound on the weights.
        kept = int(np.count_nonzero(weights >= np.float32(params.min_p)))
        complete = count in (size, params.top_k) or (params.min_p > 0.0 and kept < count)
        if params.top_p < 1.0:
            target = params.top_p * float(weights[:kept].sum()) if mass is None else mass
            nucleus = _passes(weights[:kept], target) + 1
            complete = complete or (mass is not None and nucleus <= kept)
            kept = min(nucleus, kept)
        if complete:
            return values[:kept], weights[:kept]
        count = size


def _softmax(logits: _Row, peak: np.float32, params: SamplingParams) -> _Row:
    """Softmax without its normalization: 1 at the peak. Differences too large for float32 become a weight of 0."""
    with np.errstate(over="ignore", under="ignore"):
        weights: _Row = logits - peak
        if params.temperature != 1.0:
            weights /= np.float32(params.temperature)
        return np.exp(weights, out=weights)


def _passes(weights: _Row, target: float) -> int:
    """First index at which the running sum of `weights` is at least `target`; their number when it stays below.

    Sums per chunk first: a running sum over the whole vocabulary costs ten times as much.
    """
    sums = _chunk_sums(weights)
    chunk = int(np.searchsorted(sums, target))
    if chunk == sums.size:
        return weights.size
    inner = np.cumsum(weights[chunk * _CHUNK : (chunk + 1) * _CHUNK], dtype=np.float64)
    before = sums[chunk - 1] if chunk else 0.0
    # The two ways of summing differ by rounding.
    return chunk * _CHUNK + min(int(np.searchsorted(inner, target - before)), inner.size - 1)


def _pick(weights: _Row, number: float) -> int:
    """Index at which the running sum of `weights` passes `number` of the total; never one of weight 0."""
    sums = _chunk_sums(weights)
    target = min(number * sums[-1], np.nextafter(sums[-1], 0.0))
    chunk = int(np.searchsorted(sums, target, side="right"))
    inner = weights[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    before = sums[chunk - 1] if chunk else 0.0
    offset = int(np.searchsorted(np.cumsum(inner, dtype=np.float64), target - before, side="right"))
    if offset == inner.size:
        offset = int(np.flatnonzero(inner)[-1])
    return chunk * _CHUNK + offset


def _chunk_sums(weights: _Row) -> NDArray[np.float64]:
    """Running sum of `weights` at the end of every chunk."""
    whole = weights.size // _CHUNK * _CHUNK
    sums = weights[:whole].reshape(-1, _CHUNK).sum(axis=1)
    if whole < weights.size:
        sums = np.append(sums, weights[whole:].sum())
    return np.cumsum(sums, dtype=np.float64)


def _logprob(logits: _Row, token: int, num_top: int) -> TokenLogprob:
    peak = logits.max()
    with np.errstate(over="ignore", under="ignore"):
        normalizer = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = [(int(i), float(logits[i]) - normalizer) for i in largest(logits, num_top)]
    return TokenLogprob(token, float(logits[token]) - normalizer, top)
