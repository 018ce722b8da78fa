"""Attention over the paged cache with the native CPU kernels."""

from __future__ import annotations

import torch

from proa.attention.batch import ForwardBatch
from proa.attention.shape import HeadShape
from proa.device.backend import Device
from proa.kvcache.pool import KVPool
from proa.native import ops

__all__ = ["CpuAttention"]


class CpuAttention:
    """Keeps the per-layer views of the pool it saw last: they are the same from step to step."""

    __slots__ = ("_kv", "_layers", "_pool")

    is_capturable = False

    def __init__(self, device: Device, _shape: HeadShape) -> None:
        self._pool = device.runtime.pool
        self._kv: KVPool | None = None
        self._layers: list[_LayerCache] = []

    def begin(self, batch: ForwardBatch, kv: KVPool) -> CpuAttentionStep:
        if kv is not self._kv:
            self._kv = kv
            self._layers = [_LayerCache(kv.key(i), kv.value(i)) for i in range(kv.layout.num_layers)]
        return CpuAttentionStep(self._pool, self._layers, batch)


class _LayerCache:
    __slots__ = ("key", "key_rows", "value", "value_rows")

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key = key
        self.value = value
        self.key_rows = key.flatten(1)
        self.value_rows = value.flatten(1)


class CpuAttentionStep:
    """One forward pass; see AttentionStep for shapes."""

    __slots__ = ("_batch", "_layers", "_pool")

    def __init__(self, pool: ops.ThreadPool, layers: list[_LayerCache], batch: ForwardBatch) -> None:
        self._pool = pool
        self._layers = layers
        self._batch = batch

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
        cache, batch = self._layers[layer], self._batch
        ops.kv_store(self._pool, key, cache.key_rows, batch.slots)
        if value is not None:
            ops.kv_store(self._pool, value, cache.value_rows, batch.slots)

    def attend_rows(self, layer: int, rows: slice, *, query: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        cache, batch = self._layers[layer], self._batch
        ops.paged_attention(
            self._pool,
            query,
            cache.key,
            cache.value,
            batch.block_tables,
            batch.block_size,
            batch.sequence_ids[rows],
            batch.positions[rows],
            scale,
            out,
        )
