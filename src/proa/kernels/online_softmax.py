"""Parts of the attention kernels: addressing of the paged cache and one step of the softmax over blocks of keys.

Keys have `Dk` columns in two parts, a power of two and what is left (512 + 64 for MLA's latent, 128 + 0 for many GQA
models), as Triton's tiles are powers of two. The softmax is that of Milakov and Gimelshein (2018): each row keeps its
largest score and its sum of powers of two, and what it has summed up is scaled when a larger score comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.triton_import import INTERPRETED, jit, next_power_of_2, tl

__all__ = ["LOG2_E", "AttentionShape", "key_rows", "scores", "softmax_step"]

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Tile sizes that follow from the tensors of a call."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    first: int  # columns of the keys' first part, a power of two
    rest: int  # the second part rounded up to a power of two of at least 16; 0: there is none
    value: int  # columns of the values, rounded up likewise
    latent: bool  # the values are the first part of the keys
    exact: bool  # float32 products

    @classmethod
    def of(cls, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> AttentionShape:
        """Of `[T, Hq, Dk]`, `[slots, Hkv, Dk]` and `[slots, Hkv, Dv]`."""
        heads, key_dim = q.shape[1], q.shape[2]
        value_dim = v_cache.shape[2]
        first = next_power_of_2(key_dim)
        if first != key_dim and first > 16:
            first //= 2
        first = max(16, first)
        rest = max(0, key_dim - first)
        latent = k_cache.data_ptr() == v_cache.data_ptr() and value_dim == first
        return cls(
            heads,
            k_cache.shape[1],
            key_dim,
            value_dim,
            first,
            max(16, next_power_of_2(rest)) if rest else 0,
            max(16, next_power_of_2(value_dim)),
            latent,
            INTERPRETED or k_cache.dtype == torch.float32,
        )

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads


@jit
def key_rows(table, at, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the positions `at .. at + BLOCK_N` of a sequence lie: a slot, and the slots [BLOCK_N] counted from there.

    `table`: the sequence's block table. `at` is a multiple of BLOCK_N. For a tile in one block one look-up does.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        base = tl.load(table + at // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        rows = tl.arange(0, BLOCK_N)
    else:
        positions = at + tl.arange(0, BLOCK_N)
        base = tl.cast(0, tl.int64)
        rows = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0).to(tl.int64) * BLOCK_SIZE
        rows += positions % BLOCK_SIZE
    return base, rows


@jit
def scores(q_first, q_rest, k_first, k_rest, REST: tl.constexpr, EXACT: tl.constexpr):
    """float32 [M, N] of queries `[M, D]` and keys `[N, D]`."""
    if EXACT:
        result = tl.dot(q_first, tl.trans(k_first.to(tl.float32)), input_precision="ieee")
        if REST > 0:
            result = tl.dot(q_rest, tl.trans(k_rest.to(tl.float32)), result, input_precision="ieee")
    else:
        result = tl.dot(q_first, tl.trans(k_first))
        if REST > 0:
            result = tl.dot(q_rest, tl.trans(k_rest), result)
    return result


@jit
def softmax_step(qk, v, largest, total, acc, EXACT: tl.constexpr):
    """Takes scores `qk` [M, N], in powers of two and -inf where masked, and values [N, D] into the running sums."""
    new_largest = tl.maximum(largest, tl.max(qk, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = tl.exp2(largest - base)
    p = tl.exp2(qk - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if EXACT:
        acc = tl.dot(p, v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return new_largest, total, acc
