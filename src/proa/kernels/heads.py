"""One small linear per attention head: MLA's absorbed projections."""

from __future__ import annotations

import torch

from proa.kernels.linear import multiply
from proa.kernels.triton_import import INTERPRETED, jit, tl

__all__ = ["heads_linear"]


def heads_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`out[t, h] = x[t, h] @ W_h.T` for few tokens.

    x: float32 `[T, heads, in]`, out: float32 `[T, heads, out]`, rows strided. weight: `[heads, out, in]`, contiguous,
    float32 (multiplied in float32) or bf16 (activations as two bf16 terms).
    """
    tokens, heads, in_features = x.shape
    if tokens == 0:
        return
    out_features = out.shape[2]
    exact = INTERPRETED or weight.dtype == torch.float32
    block_n, block_k = (32, 32) if exact else (64, 128)
    _heads_linear[(heads, -(-out_features // block_n), -(-tokens // 16))](
        x,
        weight,
        out,
        tokens,
        out_features,
        in_features,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        EXACT=exact,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )


@jit
def _heads_linear(
    x,
    weight,
    out,
    tokens,
    out_features,
    in_features,
    x_token,
    x_head,
    out_token,
    out_head,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2).to(tl.int64) * 16 + tl.arange(0, 16)
    inside, valid = (token < tokens)[:, None], (row < out_features)[:, None]
    rows = weight + head * out_features * in_features + row[:, None].to(tl.int64) * in_features
    acc = tl.zeros([BLOCK_N, 16], tl.float32)
    for k in range(0, in_features, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(
            x + token[:, None] * x_token + head * x_head + column, mask=inside & (column < in_features), other=0.0
        )
        w = tl.load(rows + column, mask=valid & (column < in_features), other=0.0)
        if EXACT:
            w = w.to(tl.float32)
        acc = multiply(w, a, acc, EXACT, 2)
    at = out + token[:, None] * out_token + head * out_head + row[None, :]
    tl.store(at, tl.trans(acc), mask=inside & (row < out_features)[None, :])
