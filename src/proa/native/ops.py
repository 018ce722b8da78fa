"""The native operators on torch tensors: zero copy, results written into `out`, the GIL released while they compute.

T tokens, H hidden, E experts, k top-k. Tensors are on the CPU and C-contiguous unless a row stride is allowed ("rows
strided": only the last dimension must be contiguous). Numpy arrays are taken too; they pass bf16 as uint16. Wrong
dtypes raise TypeError; wrong ranks, shapes, layouts and out-of-range ids raise ValueError, before anything is read or
written. A row of a result has the same bits whatever the batch around it, the number of threads and the ISA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from proa.native import _C
from proa.native._C import ExpertLayer, ExpertWorkspace, PackedWeight, ThreadPool

__all__ = [
    "ExpertLayer",
    "ExpertWorkspace",
    "PackedWeight",
    "ThreadPool",
    "add_rms_norm",
    "embedding_rows",
    "heads_linear",
    "kv_store",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "route",
]

Array: TypeAlias = torch.Tensor | np.ndarray

# torch >= 2.10 hands tensors over through DLPack's C exchange table, ten times faster than a numpy view.
_TAKES_TENSORS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def _view(array: Array) -> Array:
    if _TAKES_TENSORS or isinstance(array, np.ndarray):
        return array
    return array.view(torch.uint16).numpy() if array.dtype == torch.bfloat16 else array.numpy()


def rms_norm(pool: ThreadPool, x: Array, weight: Array, eps: float, out: Array) -> None:
    """`out = x * rsqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

    x, out: float32 `[R, D]` or `[T, heads, D]`, rows strided; out may be x itself. weight: float32 `[D]`.
    """
    _C.rms_norm(pool, _view(x), _view(weight), eps, _view(out))


def add_rms_norm(pool: ThreadPool, residual: Array, delta: Array, weight: Array, eps: float, out: Array) -> None:
    """`residual += delta`, then `out = rms_norm(residual)`. All float32 `[T, H]`, rows strided."""
    _C.add_rms_norm(pool, _view(residual), _view(delta), _view(weight), eps, _view(out))


def rope(
    pool: ThreadPool,
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    *,
    offset: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotates dims `offset .. offset + R` of each head of x in place (Su et al., 2021).

    x: float32 `[T, heads, D]`, rows strided. cos, sin: float32 `[max_positions, R / 2]`. positions: int32 `[T]`.
    Pair i is dims (i, i + R/2), interleaved (2i, 2i + 1): `(a, b) -> (a cos - b sin, b cos + a sin)`.
    """
    _C.rope(pool, _view(x), _view(cos), _view(sin), _view(positions), offset, interleaved)


def kv_store(pool: ThreadPool, src: Array, cache: Array, slots: Array) -> None:
    """`cache[slots[t]] = src[t]`.

    src: float32 `[T, W]`; cache: float32 or bf16 (round to nearest even) `[num_slots, W]`; rows strided.
    slots: int32 `[T]`, no two alike.
    """
    _C.kv_store(pool, _view(src), _view(cache), _view(slots))


def paged_attention(
    pool: ThreadPool,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    block_size: int,
    sequence_ids: Array,
    positions: Array,
    scale: float,
    out: Array,
) -> None:
    """`out[t, h] = softmax(scale * q[t, h] . K) V` over positions `0 .. positions[t]` of sequence `sequence_ids[t]`.

    q: float32 `[T, Hq, Dk]`; k_cache `[slots, Hkv, Dk]` and v_cache `[slots, Hkv, Dv]`, both float32 or both bf16;
    out: float32 `[T, Hq, Dv]`; rows strided (MLA passes `v_cache = k_cache[:, :, :Dv]`). Head h reads kv head
    `h // (Hq // Hkv)`. Position p of sequence s is in slot
    `block_tables[s, p // block_size] * block_size + p % block_size`.
    block_tables: int32 `[S, max_blocks]`; sequence_ids, positions: int32 `[T]`.
    """
    _C.paged_attention(
        pool,
        _view(q),
        _view(k_cache),
        _view(v_cache),
        _view(block_tables),
        block_size,
        _view(sequence_ids),
        _view(positions),
        scale,
        _view(out),
    )


def embedding_rows(pool: ThreadPool, table: Array, ids: Array, out: Array) -> None:
    """`out[t] = table[ids[t]]`.

    table: float32 or bf16 `[V, H]`; out: float32 `[T, H]`; rows strided. ids: int32 `[T]`.
    """
    _C.embedding_rows(pool, _view(table), _view(ids), _view(out))


def linear(
    pool: ThreadPool,
    x: Array,
    weight: PackedWeight,
    out: Array,
    bias: Array | None = None,
    accumulate: bool = False,
) -> None:
    """`out = x @ W.T + bias`, with `accumulate` `out += ...`.

    x: float32 `[T, in]`, out: float32 `[T, out]`, rows strided; bias: float32 `[out]`.
    """
    _C.linear(pool, _view(x), weight, _view(out), None if bias is None else _view(bias), accumulate)


def heads_linear(pool: ThreadPool, x: Array, weights: Sequence[PackedWeight], out: Array) -> None:
    """`out[t, h] = x[t, h] @ W_h.T`. x: float32 `[T, heads, in]`, out: float32 `[T, heads, out]`, rows strided."""
    _C.heads_linear(pool, _view(x), weights, _view(out))


def route(
    pool: ThreadPool,
    logits: Array,
    ids: Array,
    weights: Array,
    *,
    bias: Array | None = None,
    score: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    counts: Array | None = None,
) -> None:
    """Chooses the top-k experts of each token; of equal scores the lower expert wins.

    logits: float32 `[T, E]`. ids: int32 `[T, k]` and weights: float32 `[T, k]` are written. bias: float32 `[E]`, added
    to the scores ("softmax" or "sigmoid" of the logits) for the choice only. Groups rank by the sum of their two best
    biased scores; experts outside the best `top_groups` groups are out. Weights are the unbiased scores, divided by
    (their sum + eps) with `renormalize`, times `scale`. counts: int64 `[E]`, grows by the tokens of each expert.
    """
    _C.route(
        pool,
        _view(logits),
        _view(ids),
        _view(weights),
        None if bias is None else _view(bias),
        score,
        num_groups,
        top_groups,
        renormalize,
        eps,
        scale,
        None if counts is None else _view(counts),
    )
