"""The tensors that hold keys and values of all cached tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from proa.kvcache.layout import KVLayout

__all__ = ["KVDtype", "KVPool", "kv_bytes_per_token"]

KVDtype = Literal["float32", "bfloat16"]

_CPU = torch.device("cpu")
_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


def kv_bytes_per_token(layout: KVLayout, dtype: KVDtype) -> int:
    """Bytes one token takes over all layers."""
    return layout.elements_per_token() * _ITEM_BYTES[dtype]


class KVPool:
    """`num_blocks * block_size` slots per layer; slot `block * block_size + offset`.

    On the CPU pages are zero and take no memory until they are first written: the OS hands them out lazily.
    MLA keeps one tensor per layer; its values are a view of the keys' first `value_dim` columns.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        dtype: KVDtype = "float32",
        device: torch.device = _CPU,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype: KVDtype = dtype
        self.device = device
        slots = num_blocks * block_size
        shape = (slots, layout.num_kv_heads, layout.key_dim)
        self._keys = [_zeros(shape, dtype, device) for _ in range(layout.num_layers)]
        if layout.latent:
            self._values = [key[:, :, : layout.value_dim] for key in self._keys]
        else:
            shape = (slots, layout.num_kv_heads, layout.value_dim)
            self._values = [_zeros(shape, dtype, device) for _ in range(layout.num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of address space (of GPU memory), all of them in memory once every slot was used."""
        return kv_bytes_per_token(self.layout, self.dtype) * self.num_blocks * self.block_size

    def key(self, layer: int) -> torch.Tensor:
        """`[slots, num_kv_heads, key_dim]`."""
        return self._keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        """`[slots, num_kv_heads, value_dim]`; row-strided when latent."""
        return self._values[layer]


def _zeros(shape: tuple[int, ...], dtype: KVDtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    # np.zeros is calloc: untouched pages; torch.zeros would write them all.
    if dtype == "float32":
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.from_numpy(np.zeros(shape, dtype=np.uint16)).view(torch.bfloat16)
