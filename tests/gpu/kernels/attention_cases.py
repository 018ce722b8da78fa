"""Paged caches with random contents, and attention over them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Arguments of the attention kernels for chunks of `lengths` last tokens of contexts of `contexts`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    block: int
    sequence_ids: torch.Tensor
    positions: torch.Tensor
    scale: float

    @classmethod
    def make(
        cls,
        device: torch.device,
        heads: tuple[int, int],
        dims: tuple[int, int],
        contexts: list[int],
        lengths: list[int],
        *,
        latent: bool = False,
        dtype: torch.dtype = torch.float32,
        block: int = 8,
    ) -> PagedCase:
        key_dim, value_dim = dims
        blocks = [-(-context // block) for context in contexts]
        order = torch.randperm(sum(blocks) + 3)
        tables = torch.zeros(len(contexts), max(blocks) + 1, dtype=torch.int32)
        for s, taken in enumerate(order[: sum(blocks)].split(blocks)):
            tables[s, : blocks[s]] = taken
        slots = len(order) * block
        k_cache = torch.randn(slots, heads[1], key_dim).to(device, dtype)
        v_cache = k_cache[:, :, :value_dim] if latent else torch.randn(slots, heads[1], value_dim).to(device, dtype)
        written = torch.zeros(slots, dtype=torch.bool)
        for table, context in zip(tables.long(), contexts, strict=True):
            at = torch.arange(context)
            written[table[at // block] * block + at % block] = True
        for cache in (k_cache, v_cache):
            cache[(~written).to(device)] = torch.nan  # of nobody
        spans = list(zip(contexts, lengths, strict=True))
        sequence_ids = torch.cat([torch.full((n,), s, dtype=torch.int32) for s, n in enumerate(lengths)])
        positions = torch.cat([torch.arange(context - n, context, dtype=torch.int32) for context, n in spans])
        q = torch.randn(len(positions), heads[0], key_dim + 8).to(device)[..., :key_dim]
        if dtype == torch.bfloat16:
            q = q.to(dtype).float()
        ids = (sequence_ids.to(device), positions.to(device))
        return cls(q, k_cache, v_cache, tables.to(device), block, *ids, key_dim**-0.5)

    def expected(self) -> torch.Tensor:
        """float64 `[T, Hq, Dv]`."""
        group = self.q.shape[1] // self.k_cache.shape[1]
        rows = []
        for t, (s, position) in enumerate(zip(self.sequence_ids.tolist(), self.positions.tolist(), strict=True)):
            at = torch.arange(position + 1, device=self.q.device)
            slots = self.block_tables[s, at // self.block].long() * self.block + at % self.block
            k, v = (cache[slots].double().repeat_interleave(group, 1) for cache in (self.k_cache, self.v_cache))
            weights = torch.einsum("hd,nhd->hn", self.q[t].double(), k).mul(self.scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(rows)

    def arguments(self) -> tuple[object, ...]:
        """Up to `scale`."""
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.block,
            self.sequence_ids,
            self.positions,
            self.scale,
        )

    def tolerance(self) -> float:
        """Bound on the error of a result of values of order 1.

        float32: the roundings of a score of `Dk` products, of a sum over the context, of exp2 (2 ulp). bf16: the
        weights of the values are rounded to 8 bits, or cut to them by the interpreter.
        """
        eps32 = 2.0**-24
        score = self.q.shape[2] * eps32 * 8
        total = 4.0 * (2 * score + int(self.positions.max()) * eps32 + 4 * eps32)
        return total + (4.0 * 2.0**-8 if self.k_cache.dtype == torch.bfloat16 else 0.0)
