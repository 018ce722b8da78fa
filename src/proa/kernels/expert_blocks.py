"""Which rows each program of a grouped product takes: the (token, slot) pairs of a batch, sorted by expert.

A block is up to BLOCK_M pairs of one expert. All sizes are the largest possible ones, so nothing waits for the GPU;
programs of blocks that are not used return at once. The order of the pairs of an expert changes from run to run for
many tokens, the results of a pair do not depend on it.
"""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, next_power_of_2, tl

__all__ = ["ExpertBlocks"]

_FEW_PAIRS = 256  # sorted by one program, in one launch
_PAIRS = 1024  # of a program, where there are more
_BLOCKS = 128


class ExpertBlocks:
    """Sorted pairs of batches of up to `max_pairs` for `num_experts` experts, in memory that is used again and again.

    pairs: int32, `[blocks * block_m]`, token * top_k + slot; only the first `rows[b]` entries of block b are written.
    expert: int32 `[blocks]`, -1 for a block that is not used. rows: int32 `[blocks]`.
    """

    __slots__ = ("_counts", "_first", "_num_experts", "_ranks", "expert", "pairs", "rows")

    def __init__(self, max_pairs: int, num_experts: int, block_m: int, device: torch.device) -> None:
        """`block_m`: the largest that `sort` is called with, or 16."""
        self._num_experts = num_experts
        blocks = max(self.max_blocks(pairs, 16) for pairs in (max_pairs, min(max_pairs, _FEW_PAIRS)))
        rows = max(self.max_blocks(max_pairs, size) * size for size in (16, block_m))
        self.pairs, self.expert, self.rows, self._ranks, self._counts, self._first = (
            torch.zeros(size, dtype=torch.int32, device=device)
            for size in (rows, blocks, blocks, max_pairs, num_experts, num_experts)
        )

    def max_blocks(self, pairs: int, block_m: int) -> int:
        """The most blocks that `pairs` pairs can take."""
        return min(pairs, pairs // block_m + self._num_experts)

    def sort(self, ids: torch.Tensor, table: torch.Tensor, block_m: int) -> int:
        """Sorts the pairs of `ids` int32 `[T, k]`, contiguous, and returns how many blocks to launch.

        Left out are ids below 0 and experts e with `table[e, 0] < 0`, int64 `[E, 3]`. Ids of a token are distinct.
        """
        pairs = ids.numel()
        blocks = self.max_blocks(pairs, block_m)
        if pairs <= _FEW_PAIRS and ids.shape[0] <= block_m:
            _sort_few[(1,)](
                ids, table, self.pairs, self.expert, self.rows, pairs, blocks, table.stride(0),
                BLOCK_M=block_m, PAIRS=next_power_of_2(pairs), BLOCKS=next_power_of_2(blocks), num_warps=8,
            )  # fmt: skip
            return blocks
        self._counts.zero_()
        grid = (-(-pairs // _PAIRS),)
        _count[grid](ids, table, self._counts, self._ranks, pairs, table.stride(0), PAIRS=_PAIRS, num_warps=4)
        _divide[(-(-blocks // _BLOCKS),)](
            self._counts, self._first, self.expert, self.rows, blocks, self._num_experts,
            BLOCK_M=block_m, BLOCKS=_BLOCKS, EXPERTS=next_power_of_2(self._num_experts), num_warps=8,
        )  # fmt: skip
        _place[grid](
            ids, table, self._first, self._ranks, self.pairs, pairs, table.stride(0), BLOCK_M=block_m, PAIRS=_PAIRS
        )
        return blocks

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.pairs, self.expert, self.rows, self._ranks, self._counts, self._first))


@jit
def _load_experts(ids, table, pair, pairs, table_row):
    """The expert of each pair, -1 where it is not computed here."""
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    place = tl.load(table + expert.to(tl.int64) * table_row, mask=expert >= 0, other=-1)
    return tl.where(place >= 0, expert, -1)


@jit
def _sort_few(
    ids,
    table,
    order,
    block_expert,
    block_rows,
    pairs,
    blocks,
    table_row,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    expert = _load_experts(ids, table, pair, pairs, table_row)
    # The same as a row, loaded again: cheaper than a change of layout.
    other = _load_experts(ids, table, tl.arange(0, PAIRS), pairs, table_row)
    here = expert >= 0
    same = (expert[:, None] == other[None, :]) & here[:, None]
    before = same & (pair[None, :] < pair[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    leads = (here & (rank == 0)).to(tl.int32)
    block = tl.cumsum(leads, 0) - 1
    of_leader = tl.sum(tl.where(same.trans(1, 0) & (leads > 0)[:, None], block[:, None], 0), 0)
    tl.store(order + of_leader * BLOCK_M + rank, pair, mask=here)
    tl.store(block_expert + block, expert, mask=leads > 0)
    tl.store(block_rows + block, tl.sum(same.to(tl.int32), 1), mask=leads > 0)
    unused = tl.arange(0, BLOCKS)
    tl.store(block_expert + unused, -1, mask=(unused >= tl.sum(leads, 0)) & (unused < blocks))


@jit
def _count(ids, table, counts, ranks, pairs, table_row, PAIRS: tl.constexpr):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = _load_experts(ids, table, pair, pairs, table_row)
    rank = tl.atomic_add(counts + expert, 1, mask=expert >= 0)
    tl.store(ranks + pair, rank, mask=expert >= 0)


@jit
def _divide(
    counts,
    first,
    block_expert,
    block_rows,
    blocks,
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    taken = tl.cdiv(tl.load(counts + expert, mask=expert < num_experts, other=0), BLOCK_M)
    end = tl.cumsum(taken, 0)
    if tl.program_id(0) == 0:
        tl.store(first + expert, end - taken, mask=expert < num_experts)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    past = end[None, :] <= block[:, None]
    mine = tl.sum(past.to(tl.int32), 1)
    start = tl.sum(tl.where(past, taken[None, :], 0), 1)
    used = block < tl.max(end, 0)
    left = tl.load(counts + mine, mask=used, other=0) - (block - start) * BLOCK_M
    tl.store(block_expert + block, tl.where(used, mine, -1), mask=block < blocks)
    tl.store(block_rows + block, tl.minimum(left, BLOCK_M), mask=block < blocks)


@jit
def _place(ids, table, first, ranks, order, pairs, table_row, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = _load_experts(ids, table, pair, pairs, table_row)
    here = expert >= 0
    at = tl.load(first + expert, mask=here, other=0) * BLOCK_M + tl.load(ranks + pair, mask=here, other=0)
    tl.store(order + at, pair, mask=here)
