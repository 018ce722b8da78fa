"""Products of experts in panels with one row of activations, in float32 without tensor cores: bound by reading them.

Threads keep partial sums of their own rows and columns and add them up once, at the end. Codes become floats by their
bits alone: a nibble u under the exponent of 1 is 1 + u / 16, so that its product needs two more instructions; e4m3 and
e2m1 codes are floats with another bias, made up for in the activations and the scales by powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.activation import activate
from proa.kernels.triton_import import jit, tl
from proa.kernels.weight_tiles import find_weight, kind_of, load_scales, load_words

__all__ = ["RowTiles"]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Outputs of a program (of experts, gate and up together), step along the inputs."""

    block_n: int
    block_k: int
    num_warps: int

    def launch(
        self,
        x: torch.Tensor,
        arena: torch.Tensor,
        table: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        sizes: tuple[int, int, int],
        activation: tuple[float, float, int],
        *,
        weight_format: str,
        down: bool,
    ) -> None:
        """One of the products of `proa.kernels.experts`, each pair by itself.

        x: rows of tokens, for `down` of pairs; arena: int32; sizes: out and in features, words of a panel; activation:
        limit, alpha and code.
        """
        kind = kind_of(weight_format)
        outputs = sizes[0] if down else 2 * sizes[0]
        _row[(-(-outputs // self.block_n), ids.numel())](
            x, arena, table, ids, weights, out, *sizes, ids.shape[1], x.stride(0), out.stride(0), table.stride(0),
            *activation[:2], GATING=0 if down else activation[2], DOWN=down, KIND=kind.code, GROUPS=kind.groups,
            SCALE_BYTES=kind.scale_bytes, BLOCK_N=self.block_n, BLOCK_K=self.block_k, num_warps=self.num_warps,
        )  # fmt: skip


@jit
def _activation(x, k, word, i, columns, PER_WORD: tl.constexpr):
    """x[k + PER_WORD * word + i], float32 [1, W]."""
    column = k + PER_WORD * word + i
    return tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)


@jit
def _int4_step(words, scale, x, k, columns):
    word = tl.arange(0, words.shape[1])[None, :]
    part = tl.zeros(words.shape, tl.float32)
    total = tl.zeros([1, words.shape[1]], tl.float32)
    for i in tl.static_range(8):
        a = _activation(x, k, word, i, columns, 8)
        moved = (words << (19 - 4 * i)) if i < 5 else (words >> (4 * i - 19))
        part += ((moved & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True) * a
        total += a
    return (part * 16.0 - total * 24.0) * scale


@jit
def _mxfp4_step(words, scale, x, k, columns):
    word = tl.arange(0, words.shape[1])[None, :]
    part = tl.zeros(words.shape, tl.float32)
    for i in tl.static_range(8):
        a = _activation(x, k, word, i, columns, 8) * 1.8446744073709552e19  # 2^64
        bits = ((words << (28 - 4 * i)) >> 6) & -0x7E400000
        part += bits.to(tl.float32, bitcast=True) * a
    return part * 4.611686018427388e18 * scale  # 2^62: together e2m1's bias


@jit
def _fp8_value(words, i: tl.constexpr):
    """The code at bits 8 i times 2^-120."""
    return (((words << (24 - 8 * i)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@jit
def _bf16_step(words, x, k, columns):
    """A word is two columns."""
    word = tl.arange(0, words.shape[1])[None, :]
    part = (words << 16).to(tl.float32, bitcast=True) * _activation(x, k, word, 0, columns, 2)
    return part + (words & -65536).to(tl.float32, bitcast=True) * _activation(x, k, word, 1, columns, 2)


@jit
def _step(words, scale_bits, x, k, columns, KIND: tl.constexpr):
    """What one tile adds, float32 [N, words]; any format but fp8_block128."""
    if KIND == 0:
        part = words.to(tl.float32, bitcast=True) * _activation(
            x, k, tl.arange(0, words.shape[1])[None, :], 0, columns, 1
        )
    elif KIND == 1:
        part = _bf16_step(words, x, k, columns)
    elif KIND == 5:
        scale = tl.where(scale_bits == 0, 0x400000, scale_bits << 23).to(tl.float32, bitcast=True)
        part = _mxfp4_step(words, scale, x, k, columns)
    elif KIND == 4:
        part = _int4_step(words, scale_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), x, k, columns)
    else:
        part = _int4_step(words, (scale_bits << 16).to(tl.float32, bitcast=True), x, k, columns)
    return part


@jit
def _fp8_panel_product(
    x, data, other, n, out_features, in_features, row_words, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Of fp8_block128: a word is four rows of a column, a step the columns of one scale."""
    sum0 = tl.zeros([128, BLOCK_N // 4], tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for k in range(0, in_features, 128):
        words = load_words(data, other, n, k, out_features, in_features, row_words, 2, 0, 4, True, PAIRED, BLOCK_N, 128)
        scale = load_scales(
            data, data, other, n, k, out_features, in_features, row_words, 0, 2, 0, 4, True, PAIRED, BLOCK_N, 128
        ).to(tl.float32, bitcast=True)
        column = k + tl.arange(0, 128)[:, None]
        a = tl.load(x + column, mask=column < in_features, other=0.0).to(tl.float32) * 1.8446744073709552e19 * scale
        sum0 += _fp8_value(words, 0) * a
        sum1 += _fp8_value(words, 1) * a
        sum2 += _fp8_value(words, 2) * a
        sum3 += _fp8_value(words, 3) * a
    even = tl.join(tl.sum(sum0, 0), tl.sum(sum2, 0))
    odd = tl.join(tl.sum(sum1, 0), tl.sum(sum3, 0))
    return tl.join(even, odd).reshape(BLOCK_N) * 7.205759403792794e16  # 2^56


@jit
def _row_product(
    x, data, other, n, out_features, in_features, panel_words, KIND: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_BYTES: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N]: the tile's rows of the weight times the row of activations at `x`; arguments of load_words."""
    if KIND == 2:
        result = _fp8_panel_product(x, data, other, n, out_features, in_features, panel_words, PAIRED, BLOCK_N)
    else:
        PER_WORD: tl.constexpr = 8 if KIND >= 3 else 2 if KIND == 1 else 1
        sums = tl.zeros([BLOCK_N, BLOCK_K // PER_WORD], tl.float32)
        for k in range(0, in_features, BLOCK_K):
            words = load_words(
                data, other, n, k, out_features, in_features, panel_words,
                KIND, GROUPS, SCALE_BYTES, True, PAIRED, BLOCK_N, BLOCK_K, 4,
            )  # fmt: skip
            scale_bits = load_scales(
                data, data, other, n, k, out_features, in_features, panel_words, 0,
                KIND, GROUPS, SCALE_BYTES, True, PAIRED, BLOCK_N, BLOCK_K, 4,
            )  # fmt: skip
            sums += _step(words, scale_bits, x, k, in_features, KIND)
        result = tl.sum(sums, 1)
    return result


@jit
def _row(
    x,
    arena,
    table,
    ids,
    weights,
    out,
    out_features,
    in_features,
    panel_words,
    top_k,
    x_row,
    out_row,
    table_row,
    limit,
    alpha,
    GATING: tl.constexpr,
    DOWN: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    place = table + expert.to(tl.int64) * table_row
    first = tl.load(place, mask=expert >= 0, other=-1)
    if first < 0:
        return
    WIDTH: tl.constexpr = BLOCK_N if DOWN else BLOCK_N // 2  # columns of the result
    n = tl.program_id(0) * WIDTH
    row = x + (pair if DOWN else pair // top_k).to(tl.int64) * x_row
    data, other = find_weight(arena, place, DOWN)
    sums = _row_product(
        row, data, other, n, out_features, in_features, panel_words,
        KIND, GROUPS, SCALE_BYTES, not DOWN, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if DOWN:
        result = sums * tl.load(weights + pair)
    else:
        gate, up = sums.reshape(2, WIDTH).permute(1, 0).split()
        result = activate(gate, up, limit, alpha, GATING)
    column = n + tl.arange(0, WIDTH)
    tl.store(out + pair.to(tl.int64) * out_row + column, result.to(out.dtype.element_ty), mask=column < out_features)
