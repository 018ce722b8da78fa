"""Linears of a handful of tokens over weights of few bits, as checkpoints have them, in float32 without tensor cores.

Bound by reading the weight where the rest is cheap: a lane holds one word (8 or 4 columns) of every row of its program,
so that neighbours read neighbouring words and a lane's activations, read once in runs of 16 bytes, serve all rows.
Codes become floats by their bits alone. A nibble u under the exponent of 2^(23 - s), s bits up, is 2^(23 - s) + u;
e4m3 and e2m1 codes are floats with another bias, made up for in the activations and the scales by powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.gemv import write_row_sums
from proa.kernels.triton_import import INTERPRETED, jit, tl
from proa.kernels.weight_tiles import FP8, WeightKind, as_words

__all__ = ["PackedTiles", "packed_rows"]

_MANY_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """Rows and columns of a step, tokens of a program (1, 2 or 4)."""

    block_n: int
    block_k: int
    tokens: int
    num_warps: int


def packed_rows(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    kind: WeightKind,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    tiles: PackedTiles | None = None,
) -> None:
    """`proa.kernels.linear.linear` of a weight of kind fp8, int4 or mxfp4, products in float32."""
    tokens, in_features = x.shape
    out_features = out.shape[1]
    tiles = tiles or _choose(tokens, out_features, kind)
    words = as_words(data)
    # Programs of the same rows follow each other: the weight is read from memory once.
    _packed_rows[(-(-tokens // tiles.tokens), -(-out_features // tiles.block_n))](
        x,
        words,
        scales.view(torch.uint8),
        out,
        out if bias is None else bias,
        tokens,
        out_features,
        in_features,
        words.stride(0),
        scales.stride(0),
        x.stride(0),
        out.stride(0),
        KIND=kind.code,
        BIAS=bias is not None,
        ACCUMULATE=accumulate,
        TOKENS=tiles.tokens,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        BITS_ONLY=INTERPRETED,
        num_warps=tiles.num_warps,
    )


def _choose(tokens: int, out_features: int, kind: WeightKind) -> PackedTiles:
    together = 1 if tokens == 1 else 2 if tokens == 2 else 4
    if INTERPRETED:
        return PackedTiles(32, 256, together, 1)
    if out_features >= _MANY_ROWS:
        rows, words, warps = (8, 128, 4) if together < 4 else (8, 64, 2)
    else:  # more programs, or longer steps of each
        rows, words, warps = {1: (4, 256, 8), 2: (4, 128, 4), 4: (8, 128, 4)}[together]
    return PackedTiles(rows, words * (4 if kind.code == FP8 else 8), together, warps)


@jit
def _four(x, at, present):
    """The activations `x[at .. at + 3]`, four times float32 [1, W]; `at` [W]."""
    values = tl.load(x + at[:, None] + tl.arange(0, 4)[None, :], mask=present[:, None], other=0.0).to(tl.float32)
    even, odd = values.reshape(at.shape[0], 2, 2).split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    return x0[None, :], x1[None, :], x2[None, :], x3[None, :]


@jit
def _int4_value(words, i: tl.constexpr, BITS_ONLY: tl.constexpr):
    """The nibble at bits 4 i, i < 5, less 8."""
    if BITS_ONLY:
        bits = (words & (15 << (4 * i))) | ((150 - 4 * i) << 23)
    else:  # two constants in one instruction, which the compiler makes two of
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, 15 << (4 * i), (150 - 4 * i) << 23],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 4 * i) + 8.0)


@jit
def _int4_sum(words, x0, x1, x2, x3, x4, x5, x6, x7, BITS_ONLY: tl.constexpr):
    high = words >> 12
    part = _int4_value(words, 0, BITS_ONLY) * x0
    part += _int4_value(words, 1, BITS_ONLY) * x1
    part += _int4_value(words, 2, BITS_ONLY) * x2
    part += _int4_value(words, 3, BITS_ONLY) * x3
    part += _int4_value(words, 4, BITS_ONLY) * x4
    part += _int4_value(high, 2, BITS_ONLY) * x5
    part += _int4_value(high, 3, BITS_ONLY) * x6
    return part + _int4_value(high, 4, BITS_ONLY) * x7


@jit
def _e2m1_value(words, i: tl.constexpr):
    """The code at bits 4 i times 2^-126."""
    return (((words << (28 - 4 * i)) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)


@jit
def _e4m3_value(words, i: tl.constexpr):
    """The code at bits 8 i times 2^-120."""
    return (((words << (24 - 8 * i)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@jit
def _scale(bits, KIND: tl.constexpr):
    """float32 of what `_load_scale` gave, with the power of two that the codes of KIND lack."""
    if KIND == 2:
        return bits.to(tl.float32, bitcast=True) * 7.205759403792794e16  # 2^56
    elif KIND == 3:
        return (bits << 16).to(tl.float32, bitcast=True)
    elif KIND == 4:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # 2^62
        return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True) * 4.611686018427388e18


@jit
def _load_scale(scales, row, row_scales, word, mask, KIND: tl.constexpr):
    """The int32 bits of the scale of each word [N, W]."""
    if KIND == 2:
        at = (row // 128).to(tl.int64) * row_scales + word // 32
        return tl.load(scales.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    at = row.to(tl.int64) * row_scales + word // 4
    if KIND == 5:
        return tl.load(scales + at, mask=mask, other=0).to(tl.int32)
    return tl.load(scales.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0).to(tl.int32)


@jit
def _token_sum(words, x, token, tokens, x_token, word, present, KIND: tl.constexpr, BITS_ONLY: tl.constexpr):
    """float32 [N, W]: what each word adds for one token, yet to be scaled."""
    there = present & (token < tokens)
    row = x + token * x_token
    if KIND == 2:
        x0, x1, x2, x3 = _four(row, word * 4, there)
        part = _e4m3_value(words, 0) * (x0 * 1.8446744073709552e19)  # 2^64
        part += _e4m3_value(words, 1) * (x1 * 1.8446744073709552e19)
        part += _e4m3_value(words, 2) * (x2 * 1.8446744073709552e19)
        part += _e4m3_value(words, 3) * (x3 * 1.8446744073709552e19)
    else:
        x0, x1, x2, x3 = _four(row, word * 8, there)
        x4, x5, x6, x7 = _four(row, word * 8 + 4, there)
        if KIND == 5:
            part = _e2m1_value(words, 0) * (x0 * 1.8446744073709552e19)  # 2^64
            part += _e2m1_value(words, 1) * (x1 * 1.8446744073709552e19)
            part += _e2m1_value(words, 2) * (x2 * 1.8446744073709552e19)
            part += _e2m1_value(words, 3) * (x3 * 1.8446744073709552e19)
            part += _e2m1_value(words, 4) * (x4 * 1.8446744073709552e19)
            part += _e2m1_value(words, 5) * (x5 * 1.8446744073709552e19)
            part += _e2m1_value(words, 6) * (x6 * 1.8446744073709552e19)
            part += _e2m1_value(words, 7) * (x7 * 1.8446744073709552e19)
        else:
            part = _int4_sum(words, x0, x1, x2, x3, x4, x5, x6, x7, BITS_ONLY)
    return part


@jit
def _packed_rows(
    x,
    data,
    scales,
    out,
    bias,
    tokens,
    out_features,
    in_features,
    row_words,
    row_scales,
    x_token,
    out_token,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS_ONLY: tl.constexpr,
):
    PER_WORD: tl.constexpr = 4 if KIND == 2 else 8
    first = tl.program_id(0).to(tl.int64) * TOKENS
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = data + row[:, None].to(tl.int64) * row_words
    acc0 = tl.zeros([BLOCK_N, BLOCK_K // PER_WORD], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for k in range(0, in_features, BLOCK_K):
        word = k // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)
        present = word * PER_WORD < in_features
        mask = (row < out_features)[:, None] & present[None, :]
        at = tl.max_contiguous(word, [1])[None, :]  # one word a lane
        words = tl.load(rows + at, mask=mask, other=0)
        scale = _scale(_load_scale(scales, row[:, None], row_scales, at, mask, KIND), KIND)
        acc0 += _token_sum(words, x, first, tokens, x_token, word, present, KIND, BITS_ONLY) * scale
        if TOKENS > 1:
            acc1 += _token_sum(words, x, first + 1, tokens, x_token, word, present, KIND, BITS_ONLY) * scale
        if TOKENS > 2:
            acc2 += _token_sum(words, x, first + 2, tokens, x_token, word, present, KIND, BITS_ONLY) * scale
            acc3 += _token_sum(words, x, first + 3, tokens, x_token, word, present, KIND, BITS_ONLY) * scale
    write_row_sums(out, bias, acc0, first, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
    if TOKENS > 1:
        write_row_sums(out, bias, acc1, first + 1, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
    if TOKENS > 2:
        write_row_sums(out, bias, acc2, first + 2, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
        write_row_sums(out, bias, acc3, first + 3, tokens, row, out_features, out_token, BIAS, ACCUMULATE)
