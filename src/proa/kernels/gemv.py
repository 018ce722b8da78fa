"""Linear layers for a handful of tokens: the weight is read at the speed of memory and multiplied in float32.

Tensor cores would compute 16 tokens whatever is asked for; up to a few, plain multiplications keep pace with memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.triton_import import INTERPRETED, jit, tl

__all__ = ["MAX_TOKENS", "GemvTiles", "gemv", "is_fast", "write_row_sums"]

MAX_TOKENS = 8
_MANY_ROWS = 4096


def is_fast(tokens: int, out_features: int) -> bool:
    """Whether tensor cores would be slower; measured on an H200 (benchmarks/LOG.md)."""
    return tokens <= (4 if out_features >= _MANY_ROWS else MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Rows and columns of a step, tokens of a program (1, 2 or 4)."""

    block_n: int
    block_k: int
    tokens: int
    num_warps: int
    num_stages: int


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    tiles: GemvTiles | None = None,
) -> None:
    """`out = x @ W.T + bias`, with `accumulate` added to `out`, for up to MAX_TOKENS tokens.

    x: float32 `[T, in]`, out: float32 `[T, out]`, rows strided. weight: float32 or bf16 `[out, in]`, contiguous. bias:
    float32 `[out]`.
    """
    tokens, in_features = x.shape
    out_features = out.shape[1]
    if tokens == 0:
        return
    tiles = tiles or _choose(tokens, out_features)
    _gemv[(-(-tokens // tiles.tokens), -(-out_features // tiles.block_n))](
        x,
        weight,
        out,
        out if bias is None else bias,
        tokens,
        out_features,
        in_features,
        x.stride(0),
        out.stride(0),
        BIAS=bias is not None,
        ACCUMULATE=accumulate,
        TOKENS=tiles.tokens,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def _choose(tokens: int, out_features: int) -> GemvTiles:
    together = 1 if tokens == 1 else 2 if tokens == 2 else 4
    if INTERPRETED:
        return GemvTiles(32, 128, together, 1, 1)
    # Few rows: small steps, for enough programs to fill a large GPU.
    if together < 4:
        return GemvTiles(4 if out_features < _MANY_ROWS else 8, 512, together, 4, 3)
    return GemvTiles(8, 512, 4, 4, 3) if out_features < _MANY_ROWS else GemvTiles(16, 256, 4, 4, 4)


@jit
def _row_sum(x, token, tokens, column, present, x_token, w, acc):
    """`acc + w * x[token]`, the products of one token."""
    values = tl.load(x + token * x_token + column, mask=present & (token < tokens), other=0.0)
    return acc + w * values


@jit
def write_row_sums(
    out, bias, acc, token, tokens, row, out_features, out_token, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr
):
    """`out[token, row] = acc.sum(1) + bias`, or `+=`. acc: float32 `[rows, columns]` of one token."""
    total = tl.sum(acc, 1)
    valid = (row < out_features) & (token < tokens)
    if BIAS:
        total += tl.load(bias + row, mask=valid, other=0.0)
    at = out + token * out_token + row
    if ACCUMULATE:
        total += tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=valid)


@jit
def _gemv(
    x,
    weight,
    out,
    bias,
    tokens,
    out_features,
    in_features,
    x_token,
    out_token,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = weight + row[:, None].to(tl.int64) * in_features
    valid = (row < out_features)[:, None]
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for k in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        present = column < in_features
        w = tl.load(rows + column, mask=valid & present, other=0.0).to(tl.float32)
        acc0 = _row_sum(x, first, tokens, column, present, x_token, w, acc0)
        if TOKENS > 1:
            acc1 = _row_sum(x, first + 1, tokens, column, present, x_token, w, acc1)
        if TOKENS > 2:
            acc2 = _row_sum(x, first + 2, tokens, column, present, x_token, w, acc2)
            acc3 = _row_sum(x, first + 3, tokens, column, present, x_token, w, acc3)
    write_row_sums(out, bias, acc0, first, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
    if TOKENS > 1:
        write_row_sums(out, bias, acc1, first + 1, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
    if TOKENS > 2:
        write_row_sums(out, bias, acc2, first + 2, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
        write_row_sums(out, bias, acc3, first + 3, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
