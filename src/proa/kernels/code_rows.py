"""Products of experts of fp8 and int4 in panels with one row of activations, on Hopper: bound by reading.

As `row_products`, and as exact, on the tensor cores: the row's three bf16 terms are columns of one product with codes
that are exact in bf16 (`mma_operands`); scales multiply the sums of their columns. Codes come from memory straight into
the registers that are multiplied (`panel_operands`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.activation import activate
from proa.kernels.gluon_import import gl, gluon_jit, has_gluon
from proa.kernels.mma_operands import terms_of
from proa.kernels.panel_operands import add_product, load_chunks, panel_pointers, standing_column
from proa.kernels.weight_tiles import FP8, INT4, INT4_F16, kind_of

__all__ = ["CodeTiles", "takes_code_rows"]


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """Warps of a program (4 or 8), chunks of each in a step (2 or 4): 32 columns of int4, 16 of fp8."""

    warps: int
    chunks: int

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
        """`proa.kernels.row_products.RowTiles.launch` of what `takes_code_rows` accepts."""
        kind = kind_of(weight_format)
        columns = (32 if kind.groups else 16) * self.chunks * self.warps
        _code_rows[(-(-sizes[0] // (32 if down else 16)), ids.numel())](
            x, arena, table, ids, weights, out, *sizes, ids.shape[1], x.stride(0), out.stride(0), table.stride(0),
            *activation[:2], GATING=activation[2], DOWN=down, KIND=kind.code, GROUPS=kind.groups,
            SCALE_BYTES=kind.scale_bytes, RAGGED=int(sizes[1] % (2 * columns) > 0), WARPS=self.warps,
            CHUNKS=self.chunks, num_warps=self.warps,
        )  # fmt: skip


def takes_code_rows(gate_up: str, down: str, device: torch.device) -> bool:
    """Whether `CodeTiles` computes experts of these formats."""
    return has_gluon(device) and all(kind_of(name).code in (FP8, INT4, INT4_F16) for name in (gate_up, down))


@gluon_jit
def _load_x(pointers, begin, column, in_features, KIND: gl.constexpr, RAGGED: gl.constexpr):
    """float32 [C, 1, columns of a chunk] from column `begin` on."""
    values = gl.load(pointers + begin, mask=begin + column * RAGGED < in_features, other=0.0).to(gl.float32)
    if KIND == 2:
        values = values * 1.8446744073709552e19  # 2^64: codes are small
    return values


@gluon_jit
def _write(
    acc, weights, out, pair, n, out_features, out_row, limit, alpha, GATING: gl.constexpr, DOWN: gl.constexpr,
    KIND: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds up the sums [C, 32, 8] and stores the pair's columns."""
    WIDTH: gl.constexpr = 32 if DOWN else 16
    total = gl.sum(gl.sum(acc, 0), 1)
    if KIND == 2:
        total = gl.permute(total.reshape(2, 2, 2, 4), (2, 3, 0, 1)).reshape(32)
    else:
        total = gl.permute(total.reshape(2, 2, 8), (0, 2, 1)).reshape(32)
    written: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if DOWN:
        result = gl.convert_layout(total, written) * gl.load(weights + pair)
    else:
        both: gl.constexpr = gl.BlockedLayout([2, 1], [1, 32], [1, WARPS], [0, 1])
        gate, up = gl.split(gl.permute(gl.convert_layout(total.reshape(2, WIDTH), both), (1, 0)))
        result = activate(gl.convert_layout(gate, written), gl.convert_layout(up, written), limit, alpha, GATING)
    at = n + gl.arange(0, WIDTH, layout=written)
    gl.store(out + pair.to(gl.int64) * out_row + at, result.to(out.dtype.element_ty), mask=at < out_features)


@gluon_jit
def _code_rows(
    x, arena, table, ids, weights, out, out_features, in_features, panel_words, top_k, x_row, out_row, table_row,
    limit, alpha, GATING: gl.constexpr, DOWN: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr,
    SCALE_BYTES: gl.constexpr, RAGGED: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    pair = gl.program_id(1)
    expert = gl.load(ids + pair)
    place = table + expert.to(gl.int64) * table_row
    gate_at = gl.load(place, mask=expert >= 0, other=-1)
    if gate_at < 0:
        return
    C: gl.constexpr = WARPS * CHUNKS
    K: gl.constexpr = 16 if KIND == 2 else 32  # columns of a chunk
    STEP: gl.constexpr = C * K
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    x_load: gl.constexpr = gl.BlockedLayout([1, 1, 2], [64 // K, 1, K // 2], [WARPS, 1, 1], [2, 1, 0])
    n = gl.program_id(0) * (32 if DOWN else 16)
    base = arena + gl.multiple_of(gl.load(place + (2 if DOWN else 0)) // 4, 16)
    other = gl.multiple_of(gl.load(place + 1) // 4 - gate_at // 4, 16)
    at = panel_pointers(
        base, n, other, out_features, in_features, panel_words, DOWN, KIND, GROUPS, SCALE_BYTES, WARPS, CHUNKS
    )  # fmt: skip
    chunk = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, x_load)))[:, None, None]
    stand = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, x_load)))[None, None, :]
    column = chunk * K + standing_column(stand, KIND)
    x_ptrs = x + (pair if DOWN else pair // top_k).to(gl.int64) * x_row + column

    x_mem = gl.allocate_shared_memory(gl.bfloat16, [2, C, 8, K], gl.SwizzledSharedLayout(8, 64 // K, K // 8, [2, 1, 0]))
    x_mem.index(0).store(terms_of(_load_x(x_ptrs, 0, column, in_features, KIND, RAGGED), 8))
    # Activations two steps ahead, as the way to the L2 takes longer than one; weights one.
    x_odd = _load_x(x_ptrs, STEP, column, in_features, KIND, RAGGED)
    even = load_chunks(at, 0, in_features, KIND, GROUPS, SCALE_BYTES, RAGGED)
    zero = gl.zeros([C, 32, 8], gl.float32, layout=mma)
    acc = zero
    for begin in range(0, in_features, 2 * STEP):
        x_even = _load_x(x_ptrs, begin + 2 * STEP, column, in_features, KIND, RAGGED)
        odd = load_chunks(at, begin + STEP, in_features, KIND, GROUPS, SCALE_BYTES, RAGGED)
        acc = add_product(even, x_mem.index(0), acc, zero, mma, KIND, WARPS, CHUNKS)
        x_mem.index(1).store(terms_of(x_odd, 8))
        x_odd = _load_x(x_ptrs, begin + 3 * STEP, column, in_features, KIND, RAGGED)
        even = load_chunks(at, begin + 2 * STEP, in_features, KIND, GROUPS, SCALE_BYTES, RAGGED)
        acc = add_product(odd, x_mem.index(1), acc, zero, mma, KIND, WARPS, CHUNKS)
        x_mem.index(0).store(terms_of(x_even, 8))
    _write(acc, weights, out, pair, n, out_features, out_row, limit, alpha, GATING, DOWN, KIND, WARPS)
