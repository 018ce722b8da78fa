"""Linear layers over weights in the formats of checkpoints.

A handful of tokens are multiplied in float32 (`gemv`, `packed_rows`), up to 16 on tensor cores with activations as two
bf16 terms (16 bits of mantissa); on Hopper 2 to 16 tokens with weights of few bits have a product of their own.
Many tokens are bound by arithmetic: one term. Float32 weights, and any with `exact`, are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.gemv import gemv, is_fast
from proa.kernels.packed_rows import packed_rows
from proa.kernels.skinny_gemm import SkinnyTiles, skinny_gemm, takes_rows
from proa.kernels.triton_import import INTERPRETED, jit, tl
from proa.kernels.weight_tiles import as_words, kind_of, load_scales, load_words, tile_values

__all__ = ["LinearTiles", "linear"]

_FEW_TOKENS = 16
# Beyond, tensor cores are faster (measured on an H200, benchmarks/LOG.md).
_PACKED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Tile of tokens x outputs, step along the inputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    *,
    weight_format: str,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    exact: bool = False,
    tiles: LinearTiles | SkinnyTiles | None = None,
) -> None:
    """`out = x @ W.T + bias`, with `accumulate` added to `out`.

    x: float32 or bf16 `[T, in]`; out: float32 or bf16 `[T, out]`; rows strided. bias: float32 `[out]`. data, scales: as
    a checkpoint has them, row-major and contiguous: float32 or bf16 `[out, in]`; "fp8_block128": e4m3 `[out, in]`,
    float32 `[ceil(out/128), ceil(in/128)]`; "int4_g32", "int4_g32_f16": nibbles `[out, in/2]`, bf16 or fp16
    `[out, in/32]`; "mxfp4": nibbles, e8m0 bytes `[out, in/32]`. in is a multiple of 32, that of float32 and bf16 of
    anything. Raises UnsupportedError for other formats.
    """
    kind = kind_of(weight_format)
    tokens, in_features = x.shape
    out_features = out.shape[1]
    if tokens == 0:
        return
    if isinstance(tiles, SkinnyTiles) or (tiles is None and takes_rows(x, data, scales, kind, exact=exact)):
        skinny_gemm(x, data, scales, out, kind, bias=bias, accumulate=accumulate, tiles=tiles)
        return
    if tiles is None:
        if scales is None and is_fast(tokens, out_features):
            gemv(x, data, out, bias=bias, accumulate=accumulate)
            return
        if scales is not None and tokens <= (_FEW_TOKENS if exact else _PACKED_TOKENS):
            packed_rows(x, data, scales, out, kind, bias=bias, accumulate=accumulate)
            return
    exact = exact or INTERPRETED or weight_format == "f32"
    tiles = tiles or _choose(tokens, exact)
    words = as_words(data)
    _linear[(-(-out_features // tiles.block_n), -(-tokens // tiles.block_m))](
        x,
        words,
        words if scales is None else scales.view(torch.uint8),
        out,
        out if bias is None else bias,
        tokens,
        out_features,
        in_features,
        words.stride(0),
        0 if scales is None else scales.stride(0),
        x.stride(0),
        out.stride(0),
        KIND=kind.code,
        GROUPS=kind.groups,
        SCALE_BYTES=kind.scale_bytes,
        BIAS=bias is not None,
        ACCUMULATE=accumulate,
        EXACT=exact,
        TERMS=2 if x.dtype == torch.float32 and tiles.block_m == 16 else 1,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _choose(tokens: int, exact: bool) -> LinearTiles:
    if INTERPRETED:
        return LinearTiles(16, 32, 64, 1, 1)
    if exact:
        return LinearTiles(16, 16, 128, 4, 3)
    if tokens <= _FEW_TOKENS:
        return LinearTiles(16, 64, 128, 4, 4)
    return LinearTiles(64, 128, 64, 4, 3) if tokens <= 64 else LinearTiles(128, 128, 64, 8, 3)


@jit
def multiply(w, a, acc, EXACT: tl.constexpr, TERMS: tl.constexpr):
    """`acc + w @ a.T` for values [N, K] and activations [M, K] of any float type.

    The weights come first: Hopper's tensor cores take that operand from registers, without a fence of the shared memory
    for which all loads on their way would have to arrive.
    """
    if EXACT:
        acc = tl.dot(w, tl.trans(a.to(tl.float32)), acc, input_precision="ieee")
    else:
        high = a.to(tl.bfloat16)
        acc = tl.dot(w, tl.trans(high), acc)
        if TERMS == 2:
            acc = tl.dot(w, tl.trans((a - high.to(tl.float32)).to(tl.bfloat16)), acc)
    return acc


@jit
def _linear(
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
    GROUPS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EXACT: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    operand = tl.float32 if EXACT else tl.bfloat16
    n = tl.program_id(0) * BLOCK_N
    token = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = x + token[:, None] * x_token
    inside = (token < tokens)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scale = load_scales(
        data, scales, 0, n, 0, out_features, in_features, row_words, row_scales,
        KIND, GROUPS, SCALE_BYTES, False, False, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    for k in range(0, in_features, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(rows + column, mask=inside & (column < in_features), other=0.0)
        words = load_words(
            data, 0, n, k, out_features, in_features, row_words,
            KIND, GROUPS, SCALE_BYTES, False, False, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # Scales are too small for asynchronous copies: those of the next step are read now.
        next_scale = load_scales(
            data, scales, 0, n, k + BLOCK_K, out_features, in_features, row_words, row_scales,
            KIND, GROUPS, SCALE_BYTES, False, False, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = multiply(tile_values(words, scale, KIND, False, operand), a, acc, EXACT, TERMS)
        scale = next_scale

    acc = tl.trans(acc)
    row = n + tl.arange(0, BLOCK_N)
    if BIAS:
        acc += tl.load(bias + row, mask=row < out_features, other=0.0)[None, :]
    at = out + token[:, None] * out_token + row[None, :]
    valid = inside & (row < out_features)[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=valid)
