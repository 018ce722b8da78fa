"""The trunk on the native CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from proa.device.backend import GatedProduct, HeadsWeight, Weight
from proa.native import ops
from proa.native.ops import PackedWeight
from proa.native.runtime import CpuRuntime
from proa.weights.raw_linear import RawLinear

__all__ = ["CpuDevice"]

_CPU = torch.device("cpu")


class CpuDevice:
    """All memory is the machine's; results have the same bits whatever the batch, the threads and the ISA."""

    name = "cpu"
    torch_device = _CPU
    gated_product: GatedProduct | None = None

    def __init__(self, runtime: CpuRuntime) -> None:
        self.runtime = runtime
        # Bound once: a decoding step of a small model calls hundreds of them.
        self.embedding_rows: Callable[..., None] = partial(ops.embedding_rows, runtime.pool)
        self.rms_norm: Callable[..., None] = partial(ops.rms_norm, runtime.pool)
        self.add_rms_norm: Callable[..., None] = partial(ops.add_rms_norm, runtime.pool)
        self.rope: Callable[..., None] = partial(ops.rope, runtime.pool)
        self.route: Callable[..., None] = partial(ops.route, runtime.pool)

    def place(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def place_table(self, table: np.ndarray) -> np.ndarray:
        return table

    def rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype)

    def host_rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.rows(num_rows, *shape, dtype=dtype)

    def pack(self, raw: RawLinear) -> Weight:
        return _CpuWeight(self.runtime, PackedWeight.pack(self.runtime.pool, raw))

    def pack_heads(self, raws: Sequence[RawLinear]) -> HeadsWeight:
        return _CpuHeadsWeight(self.runtime, [PackedWeight.pack(self.runtime.pool, raw) for raw in raws])


class _CpuWeight:
    __slots__ = ("_packed", "_pool", "in_features", "nbytes", "out_features")

    def __init__(self, runtime: CpuRuntime, packed: PackedWeight) -> None:
        self._pool = runtime.pool
        self._packed = packed
        self.in_features: int = packed.in_features
        self.out_features: int = packed.out_features
        self.nbytes: int = packed.nbytes

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, accumulate: bool = False
    ) -> None:
        ops.linear(self._pool, x, self._packed, out, bias, accumulate)


class _CpuHeadsWeight:
    __slots__ = ("_heads", "_pool", "nbytes")

    def __init__(self, runtime: CpuRuntime, heads: list[PackedWeight]) -> None:
        self._pool = runtime.pool
        self._heads = heads
        self.nbytes: int = sum(head.nbytes for head in heads)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        ops.heads_linear(self._pool, x, self._heads, out)

    def values(self) -> torch.Tensor:
        raise NotImplementedError("only a GPU expands latents")
