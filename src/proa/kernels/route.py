"""The choice of experts, one program a token. The rules are those of `proa.native.ops.route`."""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, next_power_of_2, tl

__all__ = ["route"]


def route(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    score: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    counts: torch.Tensor | None = None,
) -> None:
    """Chooses the top-k experts of each token; of equal ranks the lower expert wins, NaN comes last.

    logits: float32 `[T, E]`, rows strided. ids: int32 `[T, k]` and weights: float32 `[T, k]` are written, best first.
    bias: float32 `[E]`, added to the scores ("softmax" or "sigmoid" of the logits) for the choice only. Groups, equal
    runs of experts, rank by the sum of their two best ranks; experts outside the best `top_groups` are out. Weights are
    the unbiased scores, divided by (their sum + eps) with `renormalize`, times `scale`. counts: int64 `[E]`, grows by
    the tokens of each expert.
    """
    tokens, num_experts = logits.shape
    top_k = ids.shape[1]
    if tokens == 0:
        return
    _route[(tokens,)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        ids if counts is None else counts,
        num_experts // num_groups,
        num_groups,
        eps,
        scale,
        logits.stride(0),
        ids.stride(0),
        weights.stride(0),
        BIAS=bias is not None,
        COUNTS=counts is not None,
        SIGMOID=score == "sigmoid",
        RENORMALIZE=renormalize,
        TOP_K=top_k,
        TOP_GROUPS=top_groups if top_groups < num_groups else 0,
        GROUPS=next_power_of_2(num_groups),
        SIZE=next_power_of_2(num_experts // num_groups),
        SLOTS=next_power_of_2(top_k),
        num_warps=4,
    )


@jit
def _order(ranks, valid):
    """An int64 per rank that grows with it and falls with the index: NaN above nothing but what is not valid."""
    bits = (ranks + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(ranks == ranks, key, -0x7FFFFFFF)
    return tl.where(valid, key, -0x80000000).to(tl.int64) << 32


@jit
def _best_groups(ranks, valid, top_groups: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Which groups are eligible, int32 [GROUPS]."""
    place = tl.arange(0, SIZE)[None, :]
    group = tl.arange(0, GROUPS)
    lowest = float("-inf")
    numbers = tl.where(valid & (ranks == ranks), ranks, lowest)
    first = tl.max(numbers, 1)
    at = tl.min(tl.where(numbers == first[:, None], place, SIZE), 1)
    second = tl.max(tl.where(place == at[:, None], lowest, numbers), 1)
    order = _order(first + second, tl.max(valid.to(tl.int32), 1) > 0) | (GROUPS - 1 - group).to(tl.int64)
    chosen = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(top_groups):
        best = tl.max(tl.where(chosen > 0, -0x8000000000000000, order), 0)
        chosen = tl.where(order == best, 1, chosen)
    return chosen


@jit
def _route(
    logits,
    bias,
    ids,
    weights,
    counts,
    group_size,
    num_groups,
    eps,
    scale,
    logits_token,
    ids_token,
    weights_token,
    BIAS: tl.constexpr,
    COUNTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    expert = group * group_size + place
    valid = (group < num_groups) & (place < group_size)
    logit = tl.load(logits + token * logits_token + expert, mask=valid, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.where(valid, tl.exp(logit - tl.max(tl.max(logit, 1), 0)), 0.0)
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    ranks = scores
    if BIAS:
        ranks += tl.load(bias + expert, mask=valid, other=0.0)
    eligible = valid
    if TOP_GROUPS > 0:
        eligible = valid & (_best_groups(ranks, valid, TOP_GROUPS, GROUPS, SIZE) > 0)[:, None]
    order = _order(ranks, eligible) | (GROUPS * SIZE - 1 - (group * SIZE + place)).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    chosen_scores = tl.zeros([SLOTS], tl.float32)
    total = eps
    for i in tl.static_range(TOP_K):
        best = order == tl.max(tl.max(order, 1), 0)
        score = tl.sum(tl.sum(tl.where(best, scores, 0.0), 1), 0)
        chosen_ids = tl.where(slot == i, tl.sum(tl.sum(tl.where(best, expert, 0), 1), 0), chosen_ids)
        chosen_scores = tl.where(slot == i, score, chosen_scores)
        total += score
        order = tl.where(best, -0x8000000000000000, order)
    if RENORMALIZE:
        chosen_scores = chosen_scores / total
    tl.store(ids + token * ids_token + slot, chosen_ids, mask=slot < TOP_K)
    tl.store(weights + token * weights_token + slot, chosen_scores * scale, mask=slot < TOP_K)
    if COUNTS:
        tl.atomic_add(counts + chosen_ids, 1, mask=slot < TOP_K, sem="relaxed")
