"""Routed experts on the GPU: one grouped product for gate and up, one for down, over experts in the CPU's layout.

Few tokens are bound by reading experts: each (token, slot) pair is a product of its own, in float32. Many tokens are
bound by arithmetic: pairs are sorted by expert, weights and activations become bf16 for the tensor cores, and so does
what one product hands to the next. Codes of few bits have products of their own on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.kernels.activation import gating_code
from proa.kernels.code_product import launch_product, reorder, rows_of_block, takes_codes
from proa.kernels.code_rows import CodeTiles, takes_code_rows
from proa.kernels.expert_blocks import ExpertBlocks
from proa.kernels.pair_products import ExpertTiles, launch_pairs
from proa.kernels.row_products import RowTiles
from proa.kernels.triton_import import INTERPRETED, has_warp_groups, jit, next_power_of_2, tl
from proa.kernels.weight_tiles import kind_of, panel_bytes

__all__ = ["ExpertFormat", "ExpertScratch", "ExpertTiles", "expert_bytes", "grouped_experts"]

# Of products of one row each, and of any.
_RowTiles = RowTiles | CodeTiles
AnyTiles = ExpertTiles | _RowTiles
FEW_TOKENS = 16
_REDUCE_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """Gate and up `[intermediate, hidden]` and down `[hidden, intermediate]`; hidden and intermediate multiples of 16
    and of the formats' groups. `gating`, `limit` and `alpha` as in `gated_product`."""

    hidden: int
    intermediate: int
    gate_up: str
    down: str
    gating: str = "silu"
    limit: float = float("inf")
    alpha: float = 1.0


def expert_bytes(fmt: ExpertFormat) -> tuple[int, int]:
    """Bytes of gate (and of up) and of down, as `proa.native` packs them."""
    gate = fmt.intermediate // 16 * panel_bytes(fmt.gate_up, fmt.hidden)
    return gate, fmt.hidden // 16 * panel_bytes(fmt.down, fmt.intermediate)


class ExpertScratch:
    """What the launches of a call hand over, for up to `max_tokens` tokens; shared by all layers."""

    __slots__ = ("_hidden", "_joined", "_terms", "blocks", "exact", "max_tokens", "top_k")

    def __init__(
        self,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        fmt: ExpertFormat,
        device: torch.device,
        *,
        exact: bool = False,
    ) -> None:
        """`exact`: products in float32, for tests of whole models."""
        self.max_tokens, self.top_k = max_tokens, top_k
        self.exact = exact or INTERPRETED or fmt.gate_up == "f32" or fmt.down == "f32"
        pairs, few = max_tokens * top_k, min(max_tokens, FEW_TOKENS) * top_k
        item = 4 if self.exact else 2  # few tokens hand over float32
        self.blocks = ExpertBlocks(pairs, num_experts, 128, device)
        self._hidden, self._joined, self._terms = (
            torch.zeros(size, dtype=torch.uint8, device=device)
            for size in (
                max(pairs * item, few * 4) * fmt.intermediate,
                max(pairs * item, few * 4) * fmt.hidden,
                0 if self.exact else max_tokens * fmt.hidden * 2,
            )
        )

    def buffers(self, tokens: int, fmt: ExpertFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the pairs between gate, up and down, and after down."""
        assert tokens <= self.max_tokens, f"scratch for {self.max_tokens} tokens, got {tokens}"
        dtype = torch.float32 if self.exact or tokens <= FEW_TOKENS else torch.bfloat16
        pairs = tokens * self.top_k
        hidden, joined = self._hidden.view(dtype), self._joined.view(dtype)
        return (
            hidden[: pairs * fmt.intermediate].view(pairs, fmt.intermediate),
            joined[: pairs * fmt.hidden].view(pairs, fmt.hidden),
        )

    def one_term(self, x: torch.Tensor, *, reordered: bool = False) -> torch.Tensor:
        """`x` in bf16, its columns as they are or in the order of `code_product`."""
        rounded = self._terms.view(torch.bfloat16)[: x.numel()].view(x.shape)
        if reordered:
            reorder(x, rounded)
        else:
            rounded.copy_(x)
        return rounded

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self._hidden.nbytes + self._joined.nbytes + self._terms.nbytes


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    fmt: ExpertFormat,
    out: torch.Tensor,
    scratch: ExpertScratch,
    *,
    accumulate: bool = False,
    tiles: tuple[AnyTiles, AnyTiles] | None = None,
) -> None:
    """`out[t] = sum over slots of weights[t, s] * down(activation(gate(x[t]), up(x[t])))` of the experts on this GPU.

    x, out: float32 or bf16 `[T, hidden]`, rows strided; with `accumulate` the sum is added to `out`. ids: int32
    `[T, k]` and weights: float32 `[T, k]`, contiguous; slots whose id is negative or whose expert is elsewhere add
    nothing. arena: uint8, any bytes; table: int64 `[E, 3]`, where gate, up and down of an expert begin in it, multiples
    of 64, each packed in panels as `proa.native` has them; negative: the expert is elsewhere.
    """
    tokens = x.shape[0]
    if tokens == 0:
        return
    hidden, joined = scratch.buffers(tokens, fmt)
    pairs = ids.numel() // table.shape[0]
    of_codes = tiles is None and tokens > FEW_TOKENS and not scratch.exact
    if tiles is None:
        few = tokens <= FEW_TOKENS
        tiles = _choose_rows(fmt, x.device) if few else _choose(pairs, x.device, exact=scratch.exact)
    first, second = tiles
    if not isinstance(first, ExpertTiles):
        assert not isinstance(second, ExpertTiles), "tiles of two kinds"
        _few(x, ids, weights, arena, table, fmt, hidden, joined, (first, second))
    elif of_codes and takes_codes(fmt.hidden, fmt.intermediate, fmt.gate_up, fmt.down, x.device):
        _many_codes(x, ids, weights, arena, table, fmt, hidden, joined, scratch, rows_of_block(pairs))
    else:
        assert isinstance(second, ExpertTiles), "tiles of two kinds"
        _many(x, ids, weights, arena, table, fmt, hidden, joined, scratch, (first, second))
    columns = min(_REDUCE_COLUMNS, next_power_of_2(fmt.hidden))
    _sum_slots[(tokens, -(-fmt.hidden // columns))](
        joined, ids, table, out, fmt.hidden, joined.stride(0), out.stride(0), table.stride(0),
        TOP_K=ids.shape[1], ACCUMULATE=accumulate, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def _few(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, arena: torch.Tensor, table: torch.Tensor,
    fmt: ExpertFormat, hidden: torch.Tensor, joined: torch.Tensor, tiles: tuple[_RowTiles, _RowTiles],
) -> None:  # fmt: skip
    """Writes the rows of `joined`, in a launch for gate and up and one for down."""
    base = arena.view(torch.int32)
    activation = (fmt.limit, fmt.alpha, gating_code(fmt.gating))
    sizes = (fmt.intermediate, fmt.hidden, panel_bytes(fmt.gate_up, fmt.hidden) // 4)
    tiles[0].launch(x, base, table, ids, weights, hidden, sizes, activation, weight_format=fmt.gate_up, down=False)
    sizes = (fmt.hidden, fmt.intermediate, panel_bytes(fmt.down, fmt.intermediate) // 4)
    tiles[1].launch(hidden, base, table, ids, weights, joined, sizes, activation, weight_format=fmt.down, down=True)


def _many(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, arena: torch.Tensor, table: torch.Tensor,
    fmt: ExpertFormat, hidden: torch.Tensor, joined: torch.Tensor, scratch: ExpertScratch,
    tiles: tuple[ExpertTiles, ExpertTiles],
) -> None:  # fmt: skip
    """The same over pairs sorted by expert."""
    if not scratch.exact and x.dtype != torch.bfloat16:
        x = scratch.one_term(x)
    blocks = scratch.blocks.sort(ids, table, tiles[0].block_m)
    shared = ((scratch.blocks.pairs, scratch.blocks.expert, scratch.blocks.rows), blocks)
    activation = (fmt.limit, fmt.alpha, gating_code(fmt.gating))
    base, top_k = arena.view(torch.int32), ids.shape[1]
    sizes = (fmt.intermediate, fmt.hidden, panel_bytes(fmt.gate_up, fmt.hidden) // 4)
    launch_pairs(
        x, base, table, weights, hidden, *shared, sizes, top_k, activation, tiles[0],
        weight_format=fmt.gate_up, down=False, exact=scratch.exact,
    )  # fmt: skip
    sizes = (fmt.hidden, fmt.intermediate, panel_bytes(fmt.down, fmt.intermediate) // 4)
    launch_pairs(
        hidden, base, table, weights, joined, *shared, sizes, top_k, activation, tiles[1],
        weight_format=fmt.down, down=True, exact=scratch.exact,
    )  # fmt: skip


def _many_codes(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, arena: torch.Tensor, table: torch.Tensor,
    fmt: ExpertFormat, hidden: torch.Tensor, joined: torch.Tensor, scratch: ExpertScratch, block_m: int,
) -> None:  # fmt: skip
    """The same with the products of `code_product`."""
    x = scratch.one_term(x, reordered=True)
    num_blocks = scratch.blocks.sort(ids, table, block_m)
    blocks = (scratch.blocks.pairs, scratch.blocks.expert, scratch.blocks.rows)
    shared = (blocks, num_blocks, block_m)
    activation = (fmt.limit, fmt.alpha, gating_code(fmt.gating))
    base, top_k = arena.view(torch.int32), ids.shape[1]
    sizes = (fmt.intermediate, fmt.hidden, panel_bytes(fmt.gate_up, fmt.hidden) // 4)
    launch_product(
        x, base, table, weights, hidden, *shared, sizes, top_k, activation, weight_format=fmt.gate_up, down=False
    )
    sizes = (fmt.hidden, fmt.intermediate, panel_bytes(fmt.down, fmt.intermediate) // 4)
    launch_product(
        hidden, base, table, weights, joined, *shared, sizes, top_k, activation, weight_format=fmt.down, down=True
    )


def _choose_rows(fmt: ExpertFormat, device: torch.device) -> tuple[_RowTiles, _RowTiles]:
    """Tiles of the first and the second product of few tokens."""
    if takes_code_rows(fmt.gate_up, fmt.down, device):
        first, second = (CodeTiles(4, 2 if kind_of(name).groups else 4) for name in (fmt.gate_up, fmt.down))
        return first, second
    if INTERPRETED:
        return RowTiles(64, 128, 1), RowTiles(64, 128, 1)
    return RowTiles(32, 256, 2), RowTiles(16, 256, 2)


def _choose(pairs: int, device: torch.device, *, exact: bool) -> tuple[ExpertTiles, ExpertTiles]:
    """The same of many, for `pairs` an expert on average."""
    if INTERPRETED:
        return ExpertTiles(16, 64, 128, 1, 1), ExpertTiles(16, 64, 128, 1, 1)
    if exact:
        return ExpertTiles(16, 32, 64, 4, 2), ExpertTiles(16, 32, 64, 4, 2)
    if pairs < 16:
        return ExpertTiles(16, 128, 64, 4, 3), ExpertTiles(16, 128, 64, 4, 3)
    if pairs < 128 or not has_warp_groups(device):
        return ExpertTiles(64, 128, 64, 4, 3), ExpertTiles(64, 128, 64, 4, 3)
    return ExpertTiles(128, 128, 64, 4, 3), ExpertTiles(128, 128, 64, 4, 3)


@jit
def _sum_slots(
    rows,
    ids,
    table,
    out,
    size,
    row,
    out_row,
    table_row,
    TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair)
        here = tl.load(table + expert.to(tl.int64) * table_row, mask=expert >= 0, other=-1) >= 0
        acc += tl.load(rows + pair * row + column, mask=(column < size) & here, other=0.0).to(tl.float32)
    at = out + token * out_row + column
    if ACCUMULATE:
        acc += tl.load(at, mask=column < size, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=column < size)
