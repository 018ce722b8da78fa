"""Attention over the paged cache with the Triton kernels."""

from __future__ import annotations

import torch

from proa.attention.batch import ForwardBatch
from proa.attention.shape import HeadShape
from proa.device.backend import Device
from proa.kernels.decode_attention import DecodeScratch, paged_decode
from proa.kernels.prefill_attention import paged_prefill
from proa.kernels.rows import kv_store
from proa.kvcache.pool import KVPool

__all__ = ["TritonAttention"]

# Batches of at most so many tokens are all taken for single tokens, whose contexts are split over the GPU.
_FEW_TOKENS = 32
# Sequences of one token beyond these are taken for chunks: with so many, one program a sequence fills the GPU.
_MAX_SINGLE = 256


class TritonAttention:
    """Single tokens with their context split over the GPU, chunks of prompts in tiles of tokens."""

    __slots__ = ("_scratch",)

    def __init__(self, device: Device, shape: HeadShape) -> None:
        self._scratch = DecodeScratch(_MAX_SINGLE, shape.num_heads, shape.value_dim, device.torch_device)

    def begin(self, batch: ForwardBatch, kv: KVPool) -> TritonAttentionStep:
        return TritonAttentionStep(batch, kv, self._scratch)


class TritonAttentionStep:
    """One forward pass; see AttentionStep for shapes."""

    __slots__ = ("_batch", "_kv", "_scratch", "_single")

    def __init__(self, batch: ForwardBatch, kv: KVPool, scratch: DecodeScratch) -> None:
        self._batch = batch
        self._kv = kv
        self._scratch = scratch
        tokens = batch.positions.shape[0]
        self._single = tokens if tokens <= _FEW_TOKENS else min(batch.num_single, _MAX_SINGLE)

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
        keys, values, batch, single = self._kv.key(layer), self._kv.value(layer), self._batch, self._single
        kv_store(key, keys.flatten(1), batch.slots)
        if value is not None:
            kv_store(value, values.flatten(1), batch.slots)
        tables, size = batch.block_tables, batch.block_size
        sequences, positions = batch.sequence_ids, batch.positions
        paged_decode(
            query[:single],
            keys,
            values,
            tables,
            size,
            sequences[:single],
            positions[:single],
            scale,
            out[:single],
            self._scratch,
        )
        paged_prefill(
            query[single:],
            keys,
            values,
            tables,
            size,
            sequences[single:],
            positions[single:],
            scale,
            out[single:],
        )
