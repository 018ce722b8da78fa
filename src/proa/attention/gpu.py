"""Attention over the paged cache in GPU memory."""

from __future__ import annotations

import torch

from proa.attention.batch import ForwardBatch
from proa.attention.shape import HeadShape
from proa.device.backend import Device
from proa.kernels import reference
from proa.kvcache.pool import KVPool

__all__ = ["TorchAttention"]


class TorchAttention:
    """Plain torch: any device, any model, slow. The oracle of the others."""

    def __init__(self, device: Device, _shape: HeadShape) -> None:
        assert device.name != "cpu", "the CPU has its own"

    def begin(self, batch: ForwardBatch, kv: KVPool) -> TorchAttentionStep:
        return TorchAttentionStep(batch, kv)


class TorchAttentionStep:
    """One forward pass; see AttentionStep for shapes."""

    __slots__ = ("_batch", "_kv")

    def __init__(self, batch: ForwardBatch, kv: KVPool) -> None:
        self._batch = batch
        self._kv = kv

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
        keys, values, batch = self._kv.key(layer), self._kv.value(layer), self._batch
        reference.kv_store(key, keys.flatten(1), batch.slots)
        if value is not None:
            reference.kv_store(value, values.flatten(1), batch.slots)
        reference.paged_attention(
            query,
            keys,
            values,
            batch.block_tables,
            batch.block_size,
            batch.sequence_ids,
            batch.positions,
            scale,
            out,
        )
