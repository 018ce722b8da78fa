"""Inputs and float64 references for the operator tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPS32 = 2.0**-24  # largest relative error of one float32 rounding


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch over a paged cache whose blocks are scattered; unused table entries and slots hold rubbish."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    sequence_ids: torch.Tensor
    positions: torch.Tensor
    scale: float

    @classmethod
    def make(
        cls,
        sequences: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        latent: bool = False,
        seed: int = 0,
    ) -> AttentionCase:
        """`sequences`: (cached positions, new tokens) of each. `latent`: values are the first columns of the keys."""
        generator = torch.Generator().manual_seed(seed)
        value_dim = value_dim or key_dim
        used = [-(-(past + new) // block_size) for past, new in sequences]
        num_blocks = sum(used) + 3
        order = torch.randperm(num_blocks, generator=generator).int()
        tables = torch.full((len(sequences), max(used)), 2**31 - 1, dtype=torch.int32)
        key = torch.full((num_blocks * block_size, kv_heads, key_dim), float("nan"))
        value = key[:, :, :value_dim] if latent else torch.full((*key.shape[:2], value_dim), float("nan"))
        start = 0
        for row, (blocks, (past, new)) in enumerate(zip(used, sequences, strict=True)):
            tables[row, :blocks] = order[start : start + blocks]
            start += blocks
            slots = slots_of(tables[row], block_size, past + new)
            key[slots] = torch.randn(past + new, kv_heads, key_dim, generator=generator)
            if not latent:
                value[slots] = torch.randn(past + new, kv_heads, value_dim, generator=generator)
        key = key.to(dtype)
        value = key[:, :, :value_dim] if latent else value.to(dtype)
        new_tokens = [new for _, new in sequences]
        return cls(
            query=torch.randn(sum(new_tokens), heads, key_dim, generator=generator),
            key=key,
            value=value,
            block_tables=tables,
            block_size=block_size,
            sequence_ids=torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(new_tokens)).int(),
            positions=torch.cat([torch.arange(past, past + new) for past, new in sequences]).int(),
            scale=key_dim**-0.5,
        )

    def args(self, tokens: slice = slice(None)) -> tuple[object, ...]:
        """Arguments of paged_attention between the pool and `out`."""
        return (
            self.query[tokens],
            self.key,
            self.value,
            self.block_tables,
            self.block_size,
            self.sequence_ids[tokens],
            self.positions[tokens],
            self.scale,
        )

    def new_out(self) -> torch.Tensor:
        return torch.full((*self.query.shape[:2], self.value.shape[2]), float("nan"))

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 result and the error bound of each element.

        A score is a sum of key_dim products after one scaling: off by at most (key_dim + 1) EPS32 sum|q k scale|. That
        error d changes every probability by a factor e^(2d), where exp itself adds 2 ulp and the sums over n keys n + 8
        roundings each for numerator and denominator; a merge or correction per 64 keys adds a few ulp more.
        """
        out = torch.zeros(self.new_out().shape, dtype=torch.float64)
        bound = torch.zeros_like(out)
        kv_heads, key_dim = self.key.shape[1:]
        for sequence in self.sequence_ids.unique().tolist():
            tokens = (self.sequence_ids == sequence).nonzero()[:, 0]
            seen = self.positions[tokens] + 1
            slots = slots_of(self.block_tables[sequence], self.block_size, int(seen.max()))
            key, value = self.key[slots].double(), self.value[slots].double()
            query = self.query[tokens].double().unflatten(1, (kv_heads, -1)) * self.scale
            scores = torch.einsum("tkgd,nkd->tkgn", query, key)
            hidden = (torch.arange(len(slots)) >= seen[:, None])[:, None, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("tkgn,nkd->tkgd", weights, value).flatten(1, 2)
            terms = torch.einsum("tkgd,nkd->tkgn", query.abs(), key.abs()).masked_fill(hidden, 0).amax(-1)
            n = seen[:, None, None].double()
            steps = 2 * terms * (key_dim + 1) + 2 * (n + 8) + 8 * (2 + n / 64)
            magnitude = torch.einsum("tkgn,nkd->tkgd", weights, value.abs())
            bound[tokens] = (magnitude * steps[..., None] * EPS32).flatten(1, 2)
        return out, bound


def slots_of(table: torch.Tensor, block_size: int, num_positions: int) -> torch.Tensor:
    positions = torch.arange(num_positions)
    return table[positions // block_size].long() * block_size + positions % block_size


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, so that -0 differs from 0."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
