"""Hidden states and routing to memory that CPU experts read, in one launch."""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, next_power_of_2, tl

__all__ = ["hand_over"]

_BLOCK = 2048


def hand_over(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    host: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    late_ids: torch.Tensor | None = None,
    num_late: int = 0,
) -> None:
    """Writes `host`: x float32 `[T, H]`, ids int32 `[T, k]`, weights float32 `[T, k]`, number of tokens int32 `[1]`.

    x: float32 or bf16 `[T, H]`, rows strided; ids: int32 and weights: float32 `[T, k]`, contiguous. table: int64
    `[E, n]`, `table[e, 0] >= 0` for experts on the GPU, whose ids become -1. `host` may be pinned CPU memory as the
    device sees it.

    With `late_ids`, int32 `[T, k]` where `host` is, of the `num_late` slots of least weight those that are not on the
    GPU go there instead, -1 in the others (`proa.moe.deferral.split_slots`).
    """
    tokens, hidden = x.shape
    slots = ids.shape[1]
    host_x, host_ids, host_weights, host_tokens = host
    blocks = -(-hidden // _BLOCK)
    _hand_over[(tokens, blocks + 1)](
        x, ids, weights, table, host_x, host_ids, host_weights, host_tokens, ids if late_ids is None else late_ids,
        tokens, hidden, slots, slots - num_late, blocks, x.stride(0), table.stride(0),
        LATE=late_ids is not None, BLOCK=_BLOCK, SLOTS=next_power_of_2(slots), num_warps=4,
    )  # fmt: skip


@jit
def _hand_over(
    x,
    ids,
    weights,
    table,
    host_x,
    host_ids,
    host_weights,
    host_tokens,
    host_late,
    tokens,
    hidden,
    slots,
    in_time,
    blocks,
    x_row,
    table_row,
    LATE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0)
    block = tl.program_id(1)
    if block < blocks:
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < hidden
        row = tl.load(x + token.to(tl.int64) * x_row + column, mask=inside, other=0.0)
        tl.store(host_x + token.to(tl.int64) * hidden + column, row.to(tl.float32), mask=inside)
    else:
        # No name of the branch above: in a kernel it would have one type in both.
        slot = tl.arange(0, SLOTS)
        has_slot = slot < slots
        first = token.to(tl.int64) * slots
        expert = tl.load(ids + first + slot, mask=has_slot, other=-1)
        place = tl.load(table + expert.to(tl.int64) * table_row, mask=has_slot & (expert >= 0), other=-1)
        weight = tl.load(weights + first + slot, mask=has_slot, other=0.0)
        given = tl.where(place >= 0, -1, expert)
        if LATE:
            # Ranks by weight; of equal ones the earlier slot comes first.
            outweighs = (weight[None, :] > weight[:, None]) | (
                (weight[None, :] == weight[:, None]) & (slot[None, :] < slot[:, None])
            )
            rank = tl.sum((outweighs & has_slot[None, :]).to(tl.int32), 1)
            is_late = rank >= in_time
            tl.store(host_late + first + slot, tl.where(is_late, given, -1), mask=has_slot)
            given = tl.where(is_late, -1, given)
        tl.store(host_ids + first + slot, given, mask=has_slot)
        tl.store(host_weights + first + slot, weight, mask=has_slot)
        if token == 0:
            tl.store(host_tokens, tokens)
