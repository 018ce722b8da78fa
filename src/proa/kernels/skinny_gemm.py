"""Linears of 2 to 16 tokens over rows of fp8 and 4-bit codes on Hopper's tensor cores.

Each warp of a program has other columns of the same rows, and its sums meet at the end. Weights come to shared memory
as they are, some steps ahead, and are decoded in the registers that multiply them (`mma_operands`). Products are exact
and added in float32: up to 4 tokens have their activations as three bf16 terms, more as two. Scales of groups of 32
columns multiply the sums of a group, those of fp8 the activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.gluon_import import async_copy, gl, gluon_jit, has_gluon, mma_v2
from proa.kernels.mma_operands import code_values, group_scales, in_order, operand_words, terms_of
from proa.kernels.triton_import import next_power_of_2
from proa.kernels.weight_tiles import FP8, MXFP4, WeightKind, as_words

__all__ = ["SkinnyTiles", "skinny_gemm", "takes_rows"]

# One token is faster without tensor cores.
_LEAST_TOKENS, _MOST_TOKENS = 2, 16
_EXACT_TOKENS = 4
_MANY_ROWS = 4096
_STAGES = 4


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """Rows of a program (16 or 32), its warps (4 or 8) and for each the chunks of 16 columns (codes of 4 bits: 32) of a
    step."""

    rows: int
    warps: int
    chunks: int


def takes_rows(
    x: torch.Tensor, data: torch.Tensor, scales: torch.Tensor | None, kind: WeightKind, *, exact: bool
) -> bool:
    """Whether `skinny_gemm` multiplies these, if `exact` with 24 bits of the activations: copies of 16 bytes need rows
    that begin at multiples."""
    tokens, in_features = x.shape
    return (
        _LEAST_TOKENS <= tokens <= (_EXACT_TOKENS if exact else _MOST_TOKENS)
        and kind.code >= FP8
        and in_features % (512 if kind.groups else 64) == 0
        and has_gluon(x.device)
        and all(t is None or t.data_ptr() % 16 == 0 for t in (data, scales))
    )


def skinny_gemm(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    kind: WeightKind,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    tiles: SkinnyTiles | None = None,
) -> None:
    """`proa.kernels.linear.linear` of what `takes_rows` accepts."""
    tokens, in_features = x.shape
    out_features = out.shape[1]
    tiles = tiles or _choose(tokens, out_features, kind)
    together = next_power_of_2(tokens)
    words = as_words(data)
    if scales is None:
        scales = out  # not read
    elif kind.groups:
        scales = scales.view(torch.int8 if kind.code == MXFP4 else torch.int16)
    _skinny_gemm[(-(-out_features // tiles.rows),)](
        x,
        words,
        scales,
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
        TOKENS=together,
        TERMS=4 if tokens <= _EXACT_TOKENS else 2,
        LANES=min(together, 8),
        R=tiles.rows,
        CHUNKS=tiles.chunks,
        STAGES=_STAGES,
        WARPS=tiles.warps,
        num_warps=tiles.warps,
    )


def _choose(tokens: int, out_features: int, kind: WeightKind) -> SkinnyTiles:
    """Measured on an H200 (benchmarks/LOG.md)."""
    if out_features < _MANY_ROWS:
        return SkinnyTiles(16, 8, 2 if kind.groups else 4)
    if kind.groups:
        return SkinnyTiles(32, 8, 2) if tokens <= 8 else SkinnyTiles(32, 4, 4)
    if tokens <= _EXACT_TOKENS:
        return SkinnyTiles(32, 4, 4)
    return SkinnyTiles(32, 8, 4) if tokens <= 8 else SkinnyTiles(32, 8, 2)


@gluon_jit
def _weight_pointers(data, n, out_features, row_words, C: gl.constexpr, R: gl.constexpr, layout: gl.constexpr):
    """Of the first step's words [C, R, 4], which rows there are, chunks."""
    chunk = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = n + gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    pointers = data + row.to(gl.int64)[None, :, None] * row_words + (chunk * 4 + word)
    return pointers, (row < out_features)[None, :, None], chunk


@gluon_jit
def _scale_pointers(
    scales, n, out_features, row_scales, C: gl.constexpr, R: gl.constexpr, V: gl.constexpr, layout: gl.constexpr
):
    """The same of the scales of groups [R, C], of which copies take V."""
    row = n + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    chunk = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    pointers = scales + row.to(gl.int64)[:, None] * row_scales + chunk[None, :]
    return pointers, (row < out_features)[:, None], (chunk // V * V)[None, :]


@gluon_jit
def _activation_pointers(
    x, scales, n, tokens, x_token, row_scales, C: gl.constexpr, T: gl.constexpr, K: gl.constexpr, layout: gl.constexpr
):
    """Of the first step's activations [C, T, K] and of scales of fp8, which tokens there are, chunks."""
    chunk = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    token = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    column = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    pointers = x + token * x_token + (chunk * K + column)
    return pointers, scales + n // 128 * row_scales + chunk * K // 128, token < tokens, chunk


@gluon_jit
def _activations(at, step, in_features, KIND: gl.constexpr):
    """float32 [C, T, K] of a step, of fp8 with the scales."""
    pointers, scales, inside, chunk = at
    K: gl.constexpr = pointers.shape[2]
    COLUMNS: gl.constexpr = pointers.shape[0] * K
    within = step * COLUMNS + chunk * K < in_features
    values = gl.load(pointers + step * COLUMNS, mask=inside & within, other=0.0).to(gl.float32)
    if KIND == 2:
        values = values * gl.load(scales + step * (COLUMNS // 128), mask=within, other=0.0)
    if KIND == 2 or KIND == 5:
        values = values * 1.8446744073709552e19  # 2^64: codes are small
    return values


@gluon_jit
def _fetch(weights, scales, w_mem, s_mem, step, in_features, KIND: gl.constexpr, K: gl.constexpr):
    """Starts the copies of a step into its buffers; zeros past the weight's end."""
    COLUMNS: gl.constexpr = w_mem.shape[1] * K
    WORDS: gl.constexpr = w_mem.shape[1] * w_mem.shape[3]  # of a row
    buffer = step % w_mem.shape[0]
    pointers, inside, chunk = weights
    mask = inside & (step * COLUMNS + chunk * K < in_features)
    async_copy.async_copy_global_to_shared(w_mem.index(buffer), pointers + step * WORDS, mask=mask)
    if KIND >= 3:
        pointers, inside, chunk = scales
        mask = inside & (step * COLUMNS + chunk * K < in_features)
        async_copy.async_copy_global_to_shared(s_mem.index(buffer), pointers + step * (COLUMNS // 32), mask=mask)
    async_copy.commit_group()


@gluon_jit
def _product(
    words, scales, terms, acc, codes: gl.constexpr, mma: gl.constexpr, KIND: gl.constexpr, CHUNKS: gl.constexpr
):
    """`acc` [WARPS, R, terms and tokens] and what a step adds, all of it in shared memory."""
    WARPS: gl.constexpr = acc.shape[0]
    R: gl.constexpr = acc.shape[1]
    for i in gl.static_range(CHUNKS):
        part = words.slice(i * WARPS, WARPS, 0)
        twice = gl.zeros([WARPS, R, 4, 2], gl.int32, layout=codes)
        twice += gl.expand_dims(part.load(gl.SliceLayout(3, codes)), 3)
        tile = gl.convert_layout(code_values(twice, KIND), gl.DotOperandLayout(0, mma, 2))
        operand = terms.slice(i * WARPS, WARPS, 0).permute((0, 2, 1)).load(gl.DotOperandLayout(1, mma, 2))
        if KIND >= 3:
            bits = scales.slice(i * WARPS, WARPS, 1).permute((1, 0)).load(gl.SliceLayout(2, mma))
            added = mma_v2(tile, operand, gl.zeros(acc.shape, gl.float32, layout=mma))
            acc += added * group_scales(bits, KIND)[:, :, None]
        else:
            acc = mma_v2(tile, operand, acc)
    return acc


@gluon_jit
def _write(
    acc, out, bias, n, tokens, out_features, out_token, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    TOKENS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds up the sums [WARPS, R, terms and tokens] and stores them."""
    R: gl.constexpr = acc.shape[1]
    written: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [0, 1])
    total = gl.sum(gl.sum(acc, 0).reshape(R, acc.shape[2] // TOKENS, TOKENS), 1)
    total = gl.convert_layout(total, written)
    row = n + gl.arange(0, R, layout=gl.SliceLayout(1, written))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, written))
    valid = (row < out_features)[:, None] & (token < tokens)[None, :]
    at = out + token[None, :] * out_token + row[:, None]
    if BIAS:
        total += gl.load(bias + row, mask=row < out_features, other=0.0)[:, None]
    if ACCUMULATE:
        total += gl.load(at, mask=valid, other=0.0).to(gl.float32)
    gl.store(at, total.to(out.dtype.element_ty), mask=valid)


@gluon_jit
def _skinny_gemm(
    x, data, scales, out, bias, tokens, out_features, in_features, row_words, row_scales, x_token, out_token,
    KIND: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr, TOKENS: gl.constexpr, TERMS: gl.constexpr,
    LANES: gl.constexpr, R: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = WARPS * CHUNKS
    K: gl.constexpr = 32 if KIND >= 3 else 16  # columns of a chunk
    S: gl.constexpr = 16 if KIND == 5 else 8  # scales of a copy of 16 bytes
    w_copy: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    s_copy: gl.constexpr = gl.BlockedLayout([1, S], [32 * S // C, C // S], [WARPS, 1], [1, 0])
    x_load: gl.constexpr = gl.BlockedLayout([1, 1, 8], [256 // K // LANES, LANES, K // 8], [WARPS, 1, 1], [2, 1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    codes: gl.constexpr = operand_words(WARPS, 1, R)
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // K, K // 8, [2, 1, 0])  # over the banks

    n = gl.program_id(0) * R
    w_at = _weight_pointers(data, n, out_features, row_words, C, R, w_copy)
    s_at = _scale_pointers(scales, n, out_features, row_scales, C, R, S, s_copy)
    x_at = _activation_pointers(x, scales, n, tokens, x_token, row_scales, C, TOKENS, K, x_load)
    w_mem = gl.allocate_shared_memory(gl.int32, [STAGES, C, R, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    s_mem = gl.allocate_shared_memory(
        scales.dtype.element_ty, [STAGES, R, C] if KIND >= 3 else [1, 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    x_mem = gl.allocate_shared_memory(gl.bfloat16, [2, C, TERMS * TOKENS, K], spread)
    for step in gl.static_range(STAGES - 1):
        _fetch(w_at, s_at, w_mem, s_mem, step, in_features, KIND, K)
    x_mem.index(0).store(in_order(terms_of(_activations(x_at, 0, in_features, KIND), TERMS), KIND))
    # Two steps ahead: the way to the L2 takes longer than one.
    coming = _activations(x_at, 1, in_features, KIND)
    acc = gl.zeros([WARPS, R, TERMS * TOKENS], gl.float32, layout=mma)
    for step in range((in_features + C * K - 1) // (C * K)):
        later = _activations(x_at, step + 2, in_features, KIND)
        async_copy.wait_group(STAGES - 2)
        buffer = step % STAGES
        held = s_mem.index(buffer if KIND >= 3 else 0)
        acc = _product(w_mem.index(buffer), held, x_mem.index(step % 2), acc, codes, mma, KIND, CHUNKS)
        x_mem.index((step + 1) % 2).store(in_order(terms_of(coming, TERMS), KIND))
        coming = later
        _fetch(w_at, s_at, w_mem, s_mem, step + STAGES - 1, in_features, KIND, K)
    async_copy.wait_group(0)
    if KIND == 2:
        acc = acc * 7.205759403792794e16  # 2^56
    _write(acc, out, bias, n, tokens, out_features, out_token, BIAS, ACCUMULATE, TOKENS, WARPS)
