"""Attention over the paged cache in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from proa.attention.batch import ForwardBatch, Span
from proa.attention.expanded import ExpandedChunk
from proa.attention.shape import HeadShape
from proa.device.backend import Device, HeadsWeight
from proa.kernels import reference
from proa.kvcache.pool import KVPool

__all__ = ["AttentionKernels", "GpuAttention", "torch_attention"]

# From this many tokens of a chunk on, expanding a latent cache costs less than attending to it as it is.
EXPAND_TOKENS = 128


class AttentionKernels(Protocol):
    """What differs between implementations. Arguments as in `proa.native.ops`."""

    @property
    def is_capturable(self) -> bool:
        """See AttentionBackend."""

    def kv_store(self, src: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None: ...

    def paged_attention(
        self,
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
        num_single: int,
    ) -> None:
        """The first `num_single` rows are single tokens, others chunks. A block may be longer than the cache."""


class GpuAttention:
    """Attention by `kernels`. `expand_tokens`: the shortest chunk for which a latent cache is expanded."""

    def __init__(self, kernels: AttentionKernels, *, expand_tokens: int = EXPAND_TOKENS) -> None:
        self._kernels = kernels
        self._expand_tokens = expand_tokens
        self.is_capturable = kernels.is_capturable

    def begin(self, batch: ForwardBatch, kv: KVPool) -> GpuAttentionStep:
        # A float32 cache is asked for where rounding matters; expanded keys and values are bf16.
        expands = kv.layout.latent and kv.dtype == "bfloat16"
        long = [span for span in batch.spans if expands and span.count >= self._expand_tokens]
        return GpuAttentionStep(batch, kv, self._kernels, long)


class GpuAttentionStep:
    """One forward pass; see AttentionStep for shapes."""

    __slots__ = ("_batch", "_kernels", "_kv", "_long", "long_spans", "short_ranges")

    def __init__(self, batch: ForwardBatch, kv: KVPool, kernels: AttentionKernels, long: Sequence[Span]) -> None:
        self._batch = batch
        self._kv = kv
        self._kernels = kernels
        self.long_spans = long
        self.short_ranges = _between(long, batch.positions.shape[0])
        self._long = [ExpandedChunk(span, batch, kv) for span in long]

    def attend(
        self,
        layer: int,
        *,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        self.store(layer, key, value)
        self.attend_rows(layer, slice(0, query.shape[0]), query=query, scale=scale, out=out)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See AttentionStep."""
        slots = self._batch.slots
        self._kernels.kv_store(key, self._kv.key(layer).flatten(1), slots)
        if value is not None:
            self._kernels.kv_store(value, self._kv.value(layer).flatten(1), slots)

    def attend_rows(self, layer: int, rows: slice, *, query: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """See AttentionStep."""
        batch = self._batch
        self._kernels.paged_attention(
            query,
            self._kv.key(layer),
            self._kv.value(layer),
            batch.block_tables,
            batch.block_size,
            batch.sequence_ids[rows],
            batch.positions[rows],
            scale,
            out,
            num_single=max(0, min(batch.num_single, rows.stop) - rows.start),
        )

    def attend_long(
        self,
        layer: int,
        index: int,
        *,
        query: torch.Tensor,
        w_uk: HeadsWeight,
        w_uv: HeadsWeight,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Rows of `long_spans[index]` with keys and values expanded from the latent cache.

        query float32 `[T, heads, nope_dim + rope_dim]`, rotated; out `[T, heads, value_dim]`.
        """
        chunk = self._long[index]
        for heads, keys, values in chunk.expanded(self._kv.key(layer), w_uk, w_uv, query.shape[2]):
            self._kernels.paged_attention(
                query[:, heads],
                keys,
                values,
                chunk.table,
                chunk.block_size,
                chunk.sequence_ids,
                chunk.positions,
                scale,
                out[:, heads],
                num_single=0,
            )


class _TorchKernels:
    """Plain torch: any device, any model, slow. The oracle of the others."""

    is_capturable = False  # it loops over sequences in Python
    kv_store = staticmethod(reference.kv_store)

    def paged_attention(
        self,
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
        num_single: int,  # noqa: ARG002
    ) -> None:
        reference.paged_attention(q, k_cache, v_cache, block_tables, block_size, sequence_ids, positions, scale, out)


def torch_attention(device: Device, _shape: HeadShape) -> GpuAttention:
    """Attention in plain torch operations."""
    assert device.name != "cpu", "the CPU has its own"
    return GpuAttention(_TorchKernels())


def _between(spans: Sequence[Span], rows: int) -> list[slice]:
    """The ranges of `rows` rows outside `spans`."""
    starts = [0, *(span.first + span.count for span in spans)]
    stops = [*(span.first for span in spans), rows]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
