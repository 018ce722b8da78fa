"""Draws tokens on a GPU, where the logits are, all rows of a batch at once, by the rules of `proa.engine.sampler`.

The same random number meets the same running sum of weights, so both draw the same token but where rounding in the
exponential moves a sum over the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from proa.engine.random_numbers import uniform
from proa.engine.request import Request
from proa.engine.sampler import GREEDY_TEMPERATURE, Draw

__all__ = ["BYTES_PER_DRAWN_LOGIT", "ROWS_TOGETHER", "Drawable", "draw_on_device"]

# What is drawn from at a time: sorting and summing a row takes many times its own size.
ROWS_TOGETHER = 32
# The most that is alive at once while a row is drawn from, beside the logits: the row itself, weights and keys (4 bytes
# each), its order and the buffers it is sorted with (12 and 24), or sums and what they are made of (8 each).
BYTES_PER_DRAWN_LOGIT = 60

# Logits [vocab] to draw from, or what was drawn.
Drawable: TypeAlias = NDArray[np.float32] | Draw


def draw_on_device(logits: torch.Tensor, requests: Sequence[Request]) -> list[Drawable]:
    """One result per row of `logits` float32 `[L, vocab]`, on a GPU, in the order of `requests`.

    Rows that need more than a draw (log-probabilities, penalties, biases, a constraint) or that nothing can be drawn
    from come back as they are: `proa.engine.sampler.draw` knows what to do.
    """
    drawn: list[Drawable] = []
    for first in range(0, len(requests), ROWS_TOGETHER):
        drawn += _draw(logits[first : first + ROWS_TOGETHER], requests[first : first + ROWS_TOGETHER])
    return drawn


def _draw(logits: torch.Tensor, requests: Sequence[Request]) -> list[Drawable]:
    largest = logits.amax(-1, keepdim=True)  # NaN where a row has one
    tokens = _first(logits == largest)
    sampled = [row for row, request in enumerate(requests) if _needs_draw(request) and _is_samplable(request)]
    if sampled:
        index = torch.tensor(sampled, device=logits.device)
        tokens[index] = _sample(logits[index], largest[index], [requests[row] for row in sampled])
    found = torch.stack([tokens.double(), largest[:, 0].double()]).cpu().numpy()
    drawn = [
        Draw(int(token), None) if _needs_draw(request) and np.isfinite(peak) else None
        for token, peak, request in zip(found[0], found[1], requests, strict=True)
    ]
    left = [row for row, draw in enumerate(drawn) if draw is None]
    rows = iter(logits[left].cpu().numpy()) if left else iter(())
    return [next(rows) if draw is None else draw for draw in drawn]


def _needs_draw(request: Request) -> bool:
    """Whether a token is all that is wanted of the logits as they are."""
    is_free = request.constraint is None or request.constraint.is_free
    return is_free and request.params.logprobs is None and not request.adjuster.changes(request.num_generated)


def _is_samplable(request: Request) -> bool:
    return request.params.temperature >= GREEDY_TEMPERATURE and request.params.top_k != 1


def _first(found: torch.Tensor) -> torch.Tensor:
    """Index of the first true value of each row; the number of columns where there is none."""
    columns = torch.arange(found.shape[1], device=found.device)
    return torch.where(found, columns, found.shape[1]).amin(-1)


def _sample(logits: torch.Tensor, peak: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Tokens `[R]` int64 at which the running sums of what min_p, top_k and top_p leave pass the random numbers."""
    vocab = logits.shape[1]
    params = [request.params for request in requests]

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(logits.device, dtype)[:, None]

    temperature = column([p.temperature for p in params], torch.float32)
    numbers = column([uniform(r.seed, len(r.tokens)) for r in requests], torch.float64)
    weights = torch.exp((logits - peak) / temperature)
    if all(p.top_p >= 1.0 and p.top_k <= 0 and p.min_p <= 0.0 for p in params):
        return _pick(weights, numbers)
    limited = [p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0 for p in params]
    # Rows without limits stay in the order of their ids: the sums are taken in it.
    keys = torch.where(column([float(x) for x in limited], torch.float32) > 0, logits, 0.0)
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    weights = weights.gather(1, order)
    top_k = column([float(p.top_k) if p.top_k > 0 else float(vocab) for p in params], torch.int64)
    kept = (weights >= column([p.min_p for p in params], torch.float32)) & (
        torch.arange(vocab, device=logits.device) < top_k
    )
    weights = weights * kept
    top_p = column([p.top_p for p in params], torch.float64)
    sums = weights.double().cumsum(-1)
    # The token whose running sum reaches top_p is the last one kept.
    before = sums - weights.double()
    weights = torch.where((before < top_p * sums[:, -1:]) | (top_p >= 1.0), weights, 0.0)
    return order.gather(1, _pick(weights, numbers)[:, None])[:, 0]


def _pick(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index `[R]` at which the running sum of `weights` passes `numbers` of the total; never one of weight 0."""
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    picked = torch.searchsorted(sums, target, right=True)[:, 0]
    last = weights.shape[1] - 1 - _first(weights.flip(-1) > 0)
    return torch.minimum(picked, last)
