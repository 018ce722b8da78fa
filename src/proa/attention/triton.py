"""Attention over the paged cache with the Triton kernels."""

from __future__ import annotations

import torch

from proa.attention.gpu import GpuAttention
from proa.attention.shape import MAX_SINGLE, HeadShape
from proa.device.backend import Device
from proa.kernels.decode_attention import DecodeScratch, paged_decode
from proa.kernels.prefill_attention import paged_prefill
from proa.kernels.rows import kv_store

__all__ = ["triton_attention"]

# Batches of at most so many tokens are all taken for single tokens, whose contexts are split over the GPU.
_FEW_TOKENS = 32


def triton_attention(device: Device, shape: HeadShape) -> GpuAttention:
    """Single tokens with their context split over the GPU, chunks of prompts in tiles of tokens."""
    scratch = DecodeScratch(MAX_SINGLE, shape.num_heads, shape.value_dim, device.torch_device)
    return GpuAttention(_TritonKernels(scratch))


class _TritonKernels:
    __slots__ = ("_scratch",)

    is_capturable = True
    kv_store = staticmethod(kv_store)

    def __init__(self, scratch: DecodeScratch) -> None:
        self._scratch = scratch

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
        tokens = q.shape[0]
        single = tokens if tokens <= _FEW_TOKENS else min(num_single, MAX_SINGLE)
        if single:
            paged_decode(
                q[:single],
                k_cache,
                v_cache,
                block_tables,
                block_size,
                sequence_ids[:single],
                positions[:single],
                scale,
                out[:single],
                self._scratch,
            )
        if single < tokens:
            paged_prefill(
                q[single:],
                k_cache,
                v_cache,
                block_tables,
                block_size,
                sequence_ids[single:],
                positions[single:],
                scale,
                out[single:],
            )
