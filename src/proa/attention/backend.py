"""What a model asks of an attention implementation, and the list of implementations."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch

from proa.attention.batch import ForwardBatch
from proa.attention.cpu import CpuAttention
from proa.attention.gpu import torch_attention
from proa.attention.shape import HeadShape
from proa.core.errors import ConfigError
from proa.device.backend import Device
from proa.kvcache.pool import KVPool

__all__ = ["AttentionBackend", "AttentionStep", "create_attention", "gpu_backend"]


class AttentionStep(Protocol):
    """Attention of one forward pass."""

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
        """Writes the keys and values of this step's tokens to the cache of `layer`, then attends causally.

        query float32 `[T, heads, key_dim]`; key `[T, kv_heads * key_dim]`; value `[T, kv_heads * value_dim]`, None for
        a latent cache (its values are columns of the key); out `[T, heads, value_dim]`. Rows may be strided.
        """
        ...

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """The first half of `attend`."""
        ...

    def attend_rows(self, layer: int, rows: slice, *, query: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """The second half, of some of the rows; `query` and `out` are those rows."""
        ...


class AttentionBackend(Protocol):
    """Builds the attention of each forward pass.

    `is_capturable`: steps of single tokens may be captured in a CUDA graph, with slots of -1 for rows to be left out.
    """

    @property
    def is_capturable(self) -> bool: ...

    def begin(self, batch: ForwardBatch, kv: KVPool) -> AttentionStep: ...


def _triton(device: Device, shape: HeadShape) -> AttentionBackend:
    from proa.attention.triton import triton_attention  # slow to import

    return triton_attention(device, shape)


BACKENDS: dict[str, Callable[[Device, HeadShape], AttentionBackend]] = {
    "cpu": CpuAttention,
    "torch": torch_attention,
    "triton": _triton,
}


def create_attention(name: str, device: Device, shape: HeadShape) -> AttentionBackend:
    """The backend called `name`. Raises ConfigError naming the known ones."""
    if name not in BACKENDS:
        raise ConfigError("attention backend", f"one of {sorted(BACKENDS)}", name)
    return BACKENDS[name](device, shape)


def gpu_backend(asked: str) -> tuple[str, str]:
    """The backend on a GPU for "auto", "triton", "torch" or "flashinfer", and what to say of it."""
    if asked == "torch":
        return "torch", "torch: plain operations, slow"
    instead = f" instead of {asked}" if asked in {"triton", "flashinfer"} else ""
    if importlib.util.find_spec("triton") is None:
        return "torch", f"torch{instead}, slow: the package triton is not installed"
    if asked == "flashinfer":
        return "triton", "proa's own Triton kernels instead of flashinfer"
    return "triton", "proa's Triton kernels"
