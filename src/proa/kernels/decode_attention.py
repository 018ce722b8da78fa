"""Attention of single tokens over the paged cache: the context is split over programs, then combined (Dao, 2023).

How many splits there are depends on the number of tokens and the GPU alone, so a captured graph serves any context:
each program takes its share of whatever the context is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.latent_decode import HEADS, decode_latents, takes_latents
from proa.kernels.online_softmax import LOG2_E, AttentionShape, attend, load_queries
from proa.kernels.triton_import import INTERPRETED, jit, next_power_of_2, shared_memory, tl

__all__ = ["DecodeScratch", "DecodeTiles", "paged_decode"]

# Query heads of one program, on tensor cores and in float32.
_MAX_HEADS, _MAX_EXACT_HEADS = 64, 16
_MAX_KEY_DIM = 1024
_COMBINED_COLUMNS, _COMBINED_VALUES = 64, 4096


class DecodeScratch:
    """What the splits of a call hand over, for calls of up to `max_tokens` tokens; shared by all layers."""

    __slots__ = ("_max_tokens", "_programs", "_query", "partial", "scales")

    def __init__(self, max_tokens: int, num_heads: int, value_dim: int, device: torch.device) -> None:
        self._max_tokens = max_tokens
        processors = 4
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        # As many as fit at once: MLA's fill the shared memory.
        self._programs = processors * (1 if value_dim > 256 else 4)
        slots = max(tokens * self.splits(tokens, 1) for tokens in range(1, max_tokens + 1))
        self.partial = torch.zeros(slots, num_heads, value_dim, device=device)
        self.scales = torch.zeros(slots, num_heads, device=device)
        self._query = torch.zeros(max_tokens * num_heads * _MAX_KEY_DIM, dtype=torch.bfloat16, device=device)

    def splits(self, tokens: int, programs: int) -> int:
        """Splits of the context that fill the GPU once with `programs` programs a token and split."""
        assert tokens <= self._max_tokens, f"scratch for {self._max_tokens} tokens, got {tokens}"
        return max(1, self._programs // (tokens * programs))

    def rounded(self, q: torch.Tensor) -> torch.Tensor:
        """`q` in bf16: Triton leaves an operand of the tensor cores in shared memory only if it is loaded as it is."""
        query = self._query[: q.numel()].view(q.shape)
        query.copy_(q)
        return query

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self.scales.nbytes + self._query.nbytes


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Positions of one step."""

    block_n: int
    num_warps: int
    num_stages: int


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    sequence_ids: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    tiles: DecodeTiles | None = None,
) -> None:
    """`out[t, h] = softmax(scale * q[t, h] . K) V` over positions `0 .. positions[t]` of sequence `sequence_ids[t]`.

    q, out: float32 or bf16 `[T, Hq, Dk]` and `[T, Hq, Dv]`; k_cache `[slots, Hkv, Dk]` and v_cache `[slots, Hkv, Dv]`
    of one dtype, float32 (products in float32) or bf16 (tensor cores); rows strided; MLA's absorbed form passes
    `v_cache = k_cache[:, :, :Dv]`. block_tables: int32 `[S, max_blocks]`; sequence_ids and positions: int32 `[T]`. A
    row with a negative position (padding of a captured graph) is written as zeros.
    """
    tokens = q.shape[0]
    if tokens == 0:
        return
    shape = AttentionShape.of(q, k_cache, v_cache)
    if not shape.exact and q.dtype != torch.bfloat16:
        q = scratch.rounded(q)
    if tiles is None and takes_latents(shape, k_cache, block_size):
        splits = scratch.splits(tokens, -(-shape.heads // HEADS))
        where = (block_tables, block_size, sequence_ids, positions)
        decode_latents(q, k_cache, *where, scale * LOG2_E, scratch.partial, scratch.scales, splits)
        _launch_combine(scratch, shape, splits, out)
        return
    strides = (*q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], block_tables.stride(0))
    rows = max(16, min(_MAX_EXACT_HEADS if shape.exact else _MAX_HEADS, next_power_of_2(shape.group)))
    head_blocks = -(-shape.group // rows)
    splits = scratch.splits(tokens, shape.kv_heads * head_blocks)
    tiles = tiles or _choose(shape, rows, shared_memory(q.device))
    _decode[(shape.kv_heads * head_blocks, splits, tokens)](
        q,
        k_cache,
        v_cache,
        block_tables,
        sequence_ids,
        positions,
        scratch.partial,
        scratch.scales,
        scale * LOG2_E,
        shape.heads,
        shape.group,
        head_blocks,
        shape.key_dim,
        shape.value_dim,
        *strides,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        BLOCK_N=tiles.block_n,
        FIRST=shape.first,
        REST=shape.rest,
        VALUE=shape.value,
        LATENT=shape.latent,
        EXACT=shape.exact,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    _launch_combine(scratch, shape, splits, out)


def _launch_combine(scratch: DecodeScratch, shape: AttentionShape, splits: int, out: torch.Tensor) -> None:
    # Some thousand values a program, whatever the number of splits.
    columns = min(shape.value, max(_COMBINED_COLUMNS, _COMBINED_VALUES // next_power_of_2(splits)))
    _combine[(out.shape[0], shape.heads, shape.value // columns)](
        scratch.partial,
        scratch.scales,
        out,
        splits,
        shape.heads,
        shape.value_dim,
        out.stride(0),
        out.stride(1),
        SPLITS=next_power_of_2(splits),
        COLUMNS=columns,
        num_warps=4,
    )


def _choose(shape: AttentionShape, rows: int, shared: int) -> DecodeTiles:
    if INTERPRETED:
        return DecodeTiles(32, 1, 1)
    if shape.exact:
        return DecodeTiles(16, 4, 2)
    if shape.first + shape.rest > 256:
        if shared < 160 << 10:
            return DecodeTiles(16, 8, 2)
        return DecodeTiles(64, 8, 2) if rows >= 64 else DecodeTiles(32, 4, 3)
    return DecodeTiles(128, 4, 3) if shared >= 160 << 10 else DecodeTiles(64, 4, 3)


@jit
def _decode(
    q,
    k_cache,
    v_cache,
    block_tables,
    sequence_ids,
    positions,
    partial,
    scales,
    scale,
    num_heads,
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
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    EXACT: tl.constexpr,
):
    kv_head = tl.program_id(0) // head_blocks
    split, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    in_group = tl.program_id(0) % head_blocks * ROWS + tl.arange(0, ROWS)
    real = in_group < group
    head = kv_head * group + in_group
    query = q + token * q_token + head[:, None] * q_head
    q_first, q_rest = load_queries(query, real, key_dim, FIRST, REST, EXACT, k_cache.dtype.element_ty)

    context = tl.load(positions + token) + 1
    share = tl.cdiv(tl.cdiv(context, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    begin = split * share
    end = tl.minimum(context, begin + share)
    table = block_tables + tl.load(sequence_ids + token).to(tl.int64) * table_row
    keys, values = k_cache + kv_head * k_head, v_cache + kv_head * v_head
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE], tl.float32)
    last = tl.full([ROWS], 0, tl.int32) + end - 1
    for at in range(begin, end, BLOCK_N):
        largest, total, acc = attend(
            q_first, q_rest, keys, values, table, at, end, last, scale, largest, total, acc,
            key_dim, value_dim, k_slot, v_slot, BLOCK_SIZE, BLOCK_N, FIRST, REST, VALUE, LATENT, EXACT,
        )  # fmt: skip

    value = tl.arange(0, VALUE)
    row = ((token * tl.num_programs(1) + split) * num_heads + head).to(tl.int64)
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(
        partial + row[:, None] * value_dim + value[None, :], acc, mask=real[:, None] & (value < value_dim)[None, :]
    )
    tl.store(scales + row, tl.where(empty, float("-inf"), largest + tl.log2(total)), mask=real)


@jit
def _combine(
    partial,
    scales,
    out,
    splits,
    num_heads,
    value_dim,
    out_token,
    out_head,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    value = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = (token * splits + split) * num_heads + head
    power = tl.load(scales + row, mask=split < splits, other=float("-inf"))
    largest = tl.max(power, 0)
    weight = tl.exp2(power - tl.where(largest == float("-inf"), 0.0, largest))
    # Splits without positions have written nothing that counts.
    valid = (weight > 0.0)[:, None] & (value < value_dim)[None, :]
    part = tl.load(partial + row[:, None] * value_dim + value[None, :], mask=valid, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * out_token + head * out_head + value, result.to(out.dtype.element_ty), mask=value < value_dim)
