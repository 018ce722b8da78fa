"""Rotary position embedding (Su et al., 2021) in place; YaRN and its factor are in the tables."""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, next_power_of_2, tl

__all__ = ["rope"]

_HEADS = 8  # of one program


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    offset: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotates dims `offset .. offset + R` of each head of x in place.

    x: float32 or bf16 `[T, heads, D]`, rows strided. cos, sin: float32 `[max_positions, R / 2]`, contiguous.
    positions: int32 `[T]`. Pair i is dims (i, i + R/2), interleaved (2i, 2i + 1):
    `(a, b) -> (a cos - b sin, b cos + a sin)`.
    """
    tokens, heads, _ = x.shape
    half = cos.shape[1]
    if tokens == 0:
        return
    block_heads = min(_HEADS, next_power_of_2(heads))
    _rope[(tokens, -(-heads // block_heads))](
        x[:, :, offset:],
        cos,
        sin,
        positions,
        heads,
        half,
        x.stride(0),
        x.stride(1),
        INTERLEAVED=interleaved,
        HEADS=block_heads,
        BLOCK=next_power_of_2(half),
        num_warps=2,
    )


@jit
def _rope(
    x,
    cos,
    sin,
    positions,
    heads,
    half,
    x_token,
    x_head,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    position = tl.load(positions + token).to(tl.int64)
    valid = (head < heads)[:, None] & (pair < half)[None, :]
    c = tl.load(cos + position * half + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + position * half + pair, mask=pair < half, other=0.0)[None, :]
    rows = x + token * x_token + head[:, None] * x_head
    if INTERLEAVED:
        first, second = rows + 2 * pair[None, :], rows + 2 * pair[None, :] + 1
    else:
        first, second = rows + pair[None, :], rows + pair[None, :] + half
    a = tl.load(first, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(second, mask=valid, other=0.0).to(tl.float32)
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask=valid)
    tl.store(second, (b * c + a * s).to(x.dtype.element_ty), mask=valid)
