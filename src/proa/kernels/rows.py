"""Rows by index: embedding look-up and writes to the KV cache."""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, tl

__all__ = ["embedding_rows", "kv_store"]

_BLOCK = 1024


def embedding_rows(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """`out[t] = table[ids[t]]`. table: float32 or bf16 `[V, H]`; out: float32 or bf16 `[T, H]`; ids: int32 `[T]`."""
    _launch(table, ids, out, out.shape[0], out.shape[1], gather=True)


def kv_store(src: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """`cache[slots[t]] = src[t]`, rounded to nearest even.

    src: float32 or bf16 `[T, W]`; cache: float32 or bf16 `[num_slots, W]`; rows strided. slots: int32 `[T]`; a negative
    one (a padding row of a captured graph) writes nothing.
    """
    _launch(src, slots, cache, src.shape[0], src.shape[1], gather=False)


def _launch(src: torch.Tensor, index: torch.Tensor, dst: torch.Tensor, tokens: int, size: int, *, gather: bool) -> None:
    if tokens == 0:
        return
    _copy_rows[(tokens, -(-size // _BLOCK))](
        src, index, dst, size, src.stride(0), dst.stride(0), GATHER=gather, BLOCK=_BLOCK, num_warps=4
    )


@jit
def _copy_rows(src, index, dst, size, src_row, dst_row, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    other = tl.load(index + token).to(tl.int64)
    valid = (columns < size) & (other >= 0)
    if GATHER:
        values = tl.load(src + other * src_row + columns, mask=valid)
        tl.store(dst + token * dst_row + columns, values.to(dst.dtype.element_ty), mask=valid)
    else:
        values = tl.load(src + token * src_row + columns, mask=valid)
        tl.store(dst + other * dst_row + columns, values.to(dst.dtype.element_ty), mask=valid)
