"""Products of experts in panels with pairs sorted by expert, on the tensor cores of any GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.activation import activate
from proa.kernels.linear import multiply
from proa.kernels.triton_import import jit, tl
from proa.kernels.weight_tiles import find_weight, kind_of, load_scales, load_words, tile_values

__all__ = ["ExpertTiles", "launch_pairs"]


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tile of pairs x outputs (of gate and up together), step along the inputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def launch_pairs(
    x: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_blocks: int,
    sizes: tuple[int, int, int],
    top_k: int,
    activation: tuple[float, float, int],
    tiles: ExpertTiles,
    *,
    weight_format: str,
    down: bool,
    exact: bool,
) -> None:
    """One of the products of `proa.kernels.experts`, over `blocks` (pairs, expert, rows) of `tiles.block_m` pairs.

    x: rows of tokens, for `down` of pairs, bf16 unless `exact`; arena: int32; sizes: out and in features, words of a
    panel; activation: limit, alpha and code. exact: multiplied in float32.
    """
    kind = kind_of(weight_format)
    outputs = sizes[0] if down else 2 * sizes[0]
    _product[(-(-outputs // tiles.block_n), num_blocks)](
        x, arena, table, weights, out, *blocks, *sizes, top_k, x.stride(0), out.stride(0), table.stride(0),
        *activation[:2], GATING=0 if down else activation[2], DOWN=down, KIND=kind.code, GROUPS=kind.groups,
        SCALE_BYTES=kind.scale_bytes, EXACT=exact, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@jit
def _product(
    x,
    arena,
    table,
    weights,
    out,
    order,
    block_expert,
    block_rows,
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
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    operand = tl.float32 if EXACT else tl.bfloat16
    PAIRED: tl.constexpr = not DOWN
    WIDTH: tl.constexpr = BLOCK_N if DOWN else BLOCK_N // 2  # columns of the result
    n = tl.program_id(0) * WIDTH
    row = tl.arange(0, BLOCK_M)
    inside = row < tl.load(block_rows + block)
    pair = tl.load(order + block * BLOCK_M + row, mask=inside, other=0)
    a_rows = x + (pair if DOWN else pair // top_k).to(tl.int64)[:, None] * x_row
    place = table + expert.to(tl.int64) * table_row
    data, other = find_weight(arena, place, DOWN)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scale = load_scales(
        data, data, other, n, 0, out_features, in_features, panel_words, 0,
        KIND, GROUPS, SCALE_BYTES, True, PAIRED, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    for k in range(0, in_features, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(a_rows + column, mask=inside[:, None] & (column < in_features), other=0.0)
        words = load_words(
            data, other, n, k, out_features, in_features, panel_words,
            KIND, GROUPS, SCALE_BYTES, True, PAIRED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # Scales are too small for asynchronous copies: those of the next step are read now.
        next_scale = load_scales(
            data, data, other, n, k + BLOCK_K, out_features, in_features, panel_words, 0,
            KIND, GROUPS, SCALE_BYTES, True, PAIRED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = multiply(tile_values(words, scale, KIND, True, operand), a, acc, EXACT, 1)
        scale = next_scale
    if DOWN:
        result = tl.trans(acc) * tl.load(weights + pair, mask=inside, other=0.0)[:, None]
    else:
        gate, up = acc.reshape(2, WIDTH, BLOCK_M).permute(1, 2, 0).split()
        result = tl.trans(activate(gate, up, limit, alpha, GATING))
    column = n + tl.arange(0, WIDTH)
    at = out + pair.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None] & (column < out_features)[None, :])
