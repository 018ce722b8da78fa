"""Causal attention of prefill chunks over the paged cache, a tile of tokens and the heads of one kv head a program."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.online_softmax import LOG2_E, AttentionShape, attend, load_queries
from proa.kernels.triton_import import INTERPRETED, jit, next_power_of_2, shared_memory, tl

__all__ = ["PrefillTiles", "paged_prefill"]


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows of a program, positions of one step."""

    rows: int  # tokens x heads of a program
    block_n: int
    num_warps: int
    num_stages: int


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    sequence_ids: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    tiles: PrefillTiles | None = None,
) -> None:
    """What `paged_decode` computes, for chunks of many tokens: tokens of a sequence are consecutive.

    Arguments as there, but that positions are not negative. The cache may also be a plain tensor of expanded keys and
    values `[positions, Hq, D]`, with one block as long as it is.
    """
    tokens = q.shape[0]
    if tokens == 0:
        return
    shape = AttentionShape.of(q, k_cache, v_cache)
    if not shape.exact:
        q = q.to(torch.bfloat16)  # loaded as it is, it stays in shared memory
    strides = (*q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], block_tables.stride(0))
    tiles = tiles or _choose(shape, shared_memory(q.device))
    heads = min(tiles.rows, next_power_of_2(shape.group))
    block_tokens = tiles.rows // heads
    head_blocks = -(-shape.group // heads)
    _prefill[(shape.kv_heads * head_blocks, -(-tokens // block_tokens))](
        q,
        k_cache,
        v_cache,
        block_tables,
        sequence_ids,
        positions,
        out,
        scale * LOG2_E,
        tokens,
        shape.group,
        head_blocks,
        shape.key_dim,
        shape.value_dim,
        *strides,
        *out.stride()[:2],
        BLOCK_SIZE=block_size,
        TOKENS=block_tokens,
        HEADS=heads,
        BLOCK_N=tiles.block_n,
        FIRST=shape.first,
        REST=shape.rest,
        VALUE=shape.value,
        LATENT=shape.latent,
        EXACT=shape.exact,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _choose(shape: AttentionShape, shared: int) -> PrefillTiles:
    if INTERPRETED:
        return PrefillTiles(32, 32, 1, 1)
    wide = shape.first + shape.rest > 256
    if shape.exact:
        return PrefillTiles(16, 16, 4, 2)
    if wide:
        return PrefillTiles(64, 64, 8, 2) if shared >= 160 << 10 else PrefillTiles(64, 16, 8, 2)
    return PrefillTiles(128, 64, 8, 3) if shared >= 160 << 10 else PrefillTiles(64, 64, 4, 2)


@jit
def _prefill(
    q,
    k_cache,
    v_cache,
    block_tables,
    sequence_ids,
    positions,
    out,
    scale,
    num_tokens,
    group,
    head_blocks,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    q_token,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_row,
    out_token,
    out_head,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    EXACT: tl.constexpr,
):
    kv_head = tl.program_id(0) // head_blocks
    # The last tokens have the longest contexts: they go first.
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    stop = tl.minimum(num_tokens, start + TOKENS)
    row = tl.arange(0, TOKENS * HEADS)
    token = (start + row // HEADS).to(tl.int64)
    in_group = tl.program_id(0) % head_blocks * HEADS + row % HEADS
    head = kv_head * group + in_group
    real = (token < num_tokens) & (in_group < group)
    query = q + token[:, None] * q_token + head[:, None] * q_head
    q_first, q_rest = load_queries(query, real, key_dim, FIRST, REST, EXACT, k_cache.dtype.element_ty)
    own = tl.load(positions + token, mask=real, other=-1)
    own_sequence = tl.load(sequence_ids + token, mask=real, other=-1)
    keys, values = k_cache + kv_head * k_head, v_cache + kv_head * v_head
    largest = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    acc = tl.zeros([TOKENS * HEADS, VALUE], tl.float32)

    # Sequence after sequence, most often one; rows of others are masked.
    at_token = start
    while at_token < stop:
        sequence = tl.load(sequence_ids + at_token)
        mine = real & (own_sequence == sequence) & (token >= at_token)
        last = tl.where(mine, own, -1)
        context = tl.max(last, 0) + 1
        table = block_tables + sequence.to(tl.int64) * table_row
        for at in range(0, context, BLOCK_N):
            largest, total, acc = attend(
                q_first, q_rest, keys, values, table, at, context, last, scale, largest, total, acc,
                key_dim, value_dim, k_slot, v_slot, BLOCK_SIZE, BLOCK_N, FIRST, REST, VALUE, LATENT, EXACT,
            )  # fmt: skip
        at_token = (tl.max(tl.where(mine, token, 0), 0) + 1).to(tl.int32)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    value = tl.arange(0, VALUE)
    where = out + token[:, None] * out_token + head[:, None] * out_head + value[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=real[:, None] & (value < value_dim)[None, :])
