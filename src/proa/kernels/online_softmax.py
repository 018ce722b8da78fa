"""What the attention kernels share: queries, and one step over a tile of keys and values of the paged cache.

Keys have `Dk` columns in two parts, a power of two and what is left (512 + 64 for MLA's latent, 128 + 0 for many GQA
models), as Triton's tiles are powers of two. The softmax is that of Milakov and Gimelshein (2018): each row keeps its
largest score and its sum of powers of two, and what it has summed up is scaled when a larger score comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.triton_import import INTERPRETED, jit, next_power_of_2, tl

__all__ = ["LOG2_E", "AttentionShape", "attend", "load_queries"]

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
def load_queries(
    query, real, columns, FIRST: tl.constexpr, REST: tl.constexpr, EXACT: tl.constexpr, operand: tl.constexpr
):
    """Both parts of the queries at the pointers `query` [M, 1], zeros where not `real` [M]; of `columns` columns."""
    kind: tl.constexpr = tl.float32 if EXACT else operand
    first = tl.arange(0, FIRST)[None, :]
    q_first = tl.load(query + first, mask=real[:, None] & (first < columns), other=0.0).to(kind)
    q_rest = q_first
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)[None, :]
        q_rest = tl.load(query + rest, mask=real[:, None] & (rest < columns), other=0.0).to(kind)
    return q_first, q_rest


@jit
def attend(
    q_first, q_rest, keys, values, table, at, end, last, scale, largest, total, acc, key_dim: tl.constexpr,
    value_dim: tl.constexpr, k_slot, v_slot, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr,
    REST: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Takes the positions `at .. at + BLOCK_N` below `end` into the sums; row i attends to those up to `last[i]`.

    keys, values: pointers to slot 0 of a kv head; table, at: as in `_key_rows`; the sums: as in `_softmax_step`.
    """
    position = at + tl.arange(0, BLOCK_N)
    inside = (position < end)[:, None]
    base, slot = _key_rows(table, at, end, BLOCK_SIZE, BLOCK_N)
    first, value = tl.arange(0, FIRST)[None, :], tl.arange(0, VALUE)[None, :]
    key = keys + base * k_slot + slot[:, None] * k_slot
    if key_dim == FIRST or LATENT:
        k_first = tl.load(key + first, mask=inside, other=0.0)
    else:
        k_first = tl.load(key + first, mask=inside & (first < key_dim), other=0.0)
    k_rest = k_first
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)[None, :]
        k_rest = tl.load(key + rest, mask=inside & (rest < key_dim), other=0.0)
    qk = _scores(q_first, q_rest, k_first, k_rest, REST, EXACT) * scale
    qk = tl.where(position[None, :] <= last[:, None], qk, float("-inf"))
    if LATENT:
        v = k_first
    else:
        where = values + base * v_slot + slot[:, None] * v_slot + value
        v = tl.load(where, mask=inside & (value < value_dim), other=0.0)
    return _softmax_step(qk, v, largest, total, acc, EXACT)


@jit
def _key_rows(table, at, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
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
def _scores(q_first, q_rest, k_first, k_rest, REST: tl.constexpr, EXACT: tl.constexpr):
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
def _softmax_step(qk, v, largest, total, acc, EXACT: tl.constexpr):
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
