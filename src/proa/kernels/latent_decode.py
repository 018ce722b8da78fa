"""MLA's absorbed decode on Hopper: 64 heads a program over its share of the latent cache, fetched by the copy engine.

What the plain kernel of `decode_attention` cannot say: each of two warp groups scores half of a tile's positions, the
probabilities meet in shared memory, and each multiplies them with half of the latents' columns. The fence before
that does not wait for the next tile, as it would for loads by threads. Two tiles of 64 positions and the queries fill
the shared memory of a processor.
"""

from __future__ import annotations

import torch

from proa.kernels.gluon_import import TensorDescriptor, gl, gluon_jit, has_gluon, hopper
from proa.kernels.online_softmax import AttentionShape

__all__ = ["HEADS", "decode_latents", "takes_latents"]

HEADS = 64
_POSITIONS = 64
_LATENT, _ROPE = 512, 64
# Fewer heads leave most of a tile's rows empty.
_LEAST_HEADS = 17


def takes_latents(shape: AttentionShape, k_cache: torch.Tensor, block_size: int) -> bool:
    """Whether `decode_latents` computes this call: latents of 512 + 64 columns in bf16, blocks of whole tiles."""
    return (
        has_gluon(k_cache.device)
        and shape.latent
        and not shape.exact
        and (shape.value_dim, shape.key_dim) == (_LATENT, _LATENT + _ROPE)
        and shape.kv_heads == 1
        and shape.heads >= _LEAST_HEADS
        and block_size % _POSITIONS == 0
        and k_cache.stride(0) % 8 == 0
        and k_cache.data_ptr() % 16 == 0
    )


def decode_latents(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    sequence_ids: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    partial: torch.Tensor,
    scales: torch.Tensor,
    splits: int,
) -> None:
    """`partial` and `scales` of `splits` splits a token, as `_decode` of `decode_attention` leaves them for `_combine`.

    q: bf16 `[T, heads, 576]`; k_cache: bf16 `[slots, 1, 576]`; scale: of powers of two.
    """
    tokens, heads, _ = q.shape
    rows = k_cache[:, 0]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    _decode_latents[(-(-heads // HEADS), splits, tokens)](
        TensorDescriptor.from_tensor(rows, [_POSITIONS, _LATENT], layout),
        TensorDescriptor.from_tensor(rows, [_POSITIONS, _ROPE], layout),
        q,
        block_tables,
        sequence_ids,
        positions,
        partial,
        scales,
        scale,
        heads,
        *q.stride()[:2],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=HEADS,
        BLOCK_N=_POSITIONS,
        LATENT=_LATENT,
        ROPE=_ROPE,
        num_warps=8,
    )


@gluon_jit
def _first_slot(table, at, end, BLOCK_SIZE: gl.constexpr):
    """The slot of position `at`, of which a tile of slots follows; 0 from `end` on."""
    return gl.load(table + at // BLOCK_SIZE, mask=at < end, other=0) * BLOCK_SIZE + at % BLOCK_SIZE


@gluon_jit
def _fetch(latents, ropes, slot, k_latent, k_rope, arrived, step, LATENT: gl.constexpr, ROPE: gl.constexpr):
    """Starts the copy of a tile into the buffer of `step`."""
    bar = arrived.index(step % 2)
    hopper.mbarrier.expect(bar, k_latent.shape[1] * (LATENT + ROPE) * 2)
    hopper.tma.async_copy_global_to_shared(latents, [slot, 0], bar, k_latent.index(step % 2))
    hopper.tma.async_copy_global_to_shared(ropes, [slot, LATENT], bar, k_rope.index(step % 2))


@gluon_jit
def _clear(latent, count, LATENT: gl.constexpr, layout: gl.constexpr):
    """Zeros from row `count` on: nobody has written these slots for this sequence, and 0 times NaN is NaN."""
    row = gl.arange(0, latent.shape[0], layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(LATENT // 64):
        part = latent.slice(i * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where((row < count)[:, None], values, 0.0).to(gl.bfloat16))
    hopper.fence_async_shared()


@gluon_jit
def _load_queries(
    query, head0, num_heads, q_head, ROWS: gl.constexpr, COLUMNS: gl.constexpr, read: gl.constexpr, tile: gl.constexpr
):
    """bf16 [ROWS, COLUMNS] in shared memory, zeros from head `num_heads` on."""
    head = head0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, read))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, read))
    at = query + head[:, None] * q_head + column[None, :]
    values = gl.load(at, mask=(head < num_heads)[:, None], other=0.0)
    return gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], tile, values)


@gluon_jit
def _score(q_latent, q_rope, latent, rope, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """float32 [ROWS, BLOCK_N]: queries times a tile of keys."""
    qk = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    qk = hopper.warpgroup_mma(q_rope, rope.permute((1, 0)), qk, is_async=True)
    qk = hopper.warpgroup_mma(q_latent, latent.permute((1, 0)), qk, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[qk])


@gluon_jit
def _write(
    partial, scales, row, head0, num_heads, largest, total, acc, score: gl.constexpr, sum_: gl.constexpr
):  # fmt: skip
    """A split's results: values divided by their weights' sum, and the logarithm of that."""
    row_total = gl.sum(total, 1)
    empty = row_total == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, row_total)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, sum_))[:, None]
    ROWS: gl.constexpr = acc.shape[0]
    LATENT: gl.constexpr = acc.shape[1]
    head = head0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sum_))
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, sum_))
    gl.store(partial + (row + head)[:, None] * LATENT + column[None, :], acc, mask=(head < num_heads)[:, None])
    head = head0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score))
    power = gl.where(empty, float("-inf"), largest + gl.log2(row_total))
    gl.store(scales + row + head, power, mask=head < num_heads)


@gluon_jit
def _decode_latents(
    latents, ropes, q, block_tables, sequence_ids, positions, partial, scales, scale, num_heads, q_token, q_head,
    table_row, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, LATENT: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    # Warp groups side by side: halves of the positions, then of the latents.
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    sum_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    read: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    head0, split, token = gl.program_id(0) * ROWS, gl.program_id(1), gl.program_id(2)
    k_latent = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, LATENT], tile)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, ROPE], tile)
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BLOCK_N], tile)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    query = q + token.to(gl.int64) * q_token
    q_latent = _load_queries(query, head0, num_heads, q_head, ROWS, LATENT, read, tile)
    q_rope = _load_queries(query + LATENT, head0, num_heads, q_head, ROWS, ROPE, read, tile)
    for i in gl.static_range(2):
        hopper.mbarrier.init(arrived.index(i), count=1)
    hopper.fence_async_shared()

    context = gl.load(positions + token) + 1
    share = gl.cdiv(gl.cdiv(context, BLOCK_N), gl.num_programs(1)) * BLOCK_N
    begin = split * share
    end = gl.minimum(context, begin + share)
    steps = gl.maximum(gl.cdiv(end - begin, BLOCK_N), 0)
    table = block_tables + gl.load(sequence_ids + token).to(gl.int64) * table_row
    largest = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, score))
    total = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=score)  # of each column: added up once, at the end
    acc = gl.zeros([ROWS, LATENT], gl.float32, layout=sum_)
    place = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score))
    if steps > 0:
        first = _first_slot(table, begin, end, BLOCK_SIZE)
        _fetch(latents, ropes, first, k_latent, k_rope, arrived, 0, LATENT, ROPE)
    # Looked up a step before it is needed.
    slot = _first_slot(table, begin + BLOCK_N, end, BLOCK_SIZE)
    for step in range(steps):
        at = begin + step * BLOCK_N
        if step + 1 < steps:
            _fetch(latents, ropes, slot, k_latent, k_rope, arrived, step + 1, LATENT, ROPE)
        slot = _first_slot(table, at + 2 * BLOCK_N, end, BLOCK_SIZE)
        hopper.mbarrier.wait(arrived.index(step % 2), (step // 2) & 1)
        latent = k_latent.index(step % 2)
        if at + BLOCK_N > end:
            _clear(latent, end - at, LATENT, read)
        qk = _score(q_latent, q_rope, latent, k_rope.index(step % 2), ROWS, BLOCK_N, score)
        qk = gl.where((at + place < end)[None, :], qk * scale, float("-inf"))
        new_largest = gl.maximum(largest, gl.max(qk, 1))
        shrink = gl.exp2(largest - new_largest)
        p = gl.exp2(qk - new_largest[:, None])
        total = total * shrink[:, None] + p
        largest = new_largest
        weights.store(p.to(gl.bfloat16))
        hopper.fence_async_shared()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sum_))[:, None]
        acc = hopper.warpgroup_mma(weights, latent, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    row = (token * gl.num_programs(1) + split).to(gl.int64) * num_heads
    _write(partial, scales, row, head0, num_heads, largest, total, acc, score, sum_)
