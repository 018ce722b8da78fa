"""What the layers of a model ask of the device they run on.

The trunk (embedding, norms, attention, router, shared experts, output head) runs on one device. Activations are
float32 tensors on it, results are written into `out`. Routed experts are `proa.moe`'s, wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from proa.native.runtime import CpuRuntime
from proa.weights.raw_linear import RawLinear

__all__ = ["Device", "GatedProduct", "HeadsWeight", "Weight"]


class Weight(Protocol):
    """A linear's weight `[out, in]` on the device, in the format of the checkpoint."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, accumulate: bool = False
    ) -> None:
        """`out = x @ W.T + bias`, with `accumulate` added to `out`.

        x `[T, in]`, out `[T, out]`, rows may be strided; bias `[out]`. All float32.
        """


class HeadsWeight(Protocol):
    """One weight `[out, in]` per attention head."""

    @property
    def nbytes(self) -> int: ...

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out[t, h] = x[t, h] @ W_h.T`; x float32 `[T, heads, in]`, out `[T, heads, out]`, rows may be strided."""

    def values(self) -> torch.Tensor:
        """On a GPU: bf16 `[heads, out, in]`, as many tokens are multiplied with."""


class GatedProduct(Protocol):
    """Joins gate and up. The formulas of `gating` are those of `proa.layers.mlp.Activation`."""

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor, *, gating: str, limit: float, alpha: float) -> None:
        """The halves of the columns of `gate_up` `[T, 2 I]` into `out` `[T, I]`."""


class Device(Protocol):
    """Operations of the trunk. Index tensors are int32; all tensors lie on `torch_device`."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def runtime(self) -> CpuRuntime:
        """The threads of the CPU, for experts there and for packing."""

    @property
    def gated_product(self) -> GatedProduct | None:
        """What a gated MLP of two linears has between them; None: it is an expert layer of one expert instead."""

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of a norm, bias or rotary table on the device."""

    def place_table(self, table: np.ndarray) -> torch.Tensor | np.ndarray:
        """An embedding, float32 or bf16 as uint16 `[V, H]`, for `embedding_rows`; a view where memory allows it."""

    def rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros `[num_rows, *shape]`, scratch of a forward."""

    def host_rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The same in CPU memory that the device copies from and to directly."""

    def pack(self, raw: RawLinear) -> Weight: ...

    def pack_heads(self, raws: Sequence[RawLinear]) -> HeadsWeight:
        """Weights of one shape and format, one per head."""

    def embedding_rows(self, table: torch.Tensor | np.ndarray, ids: torch.Tensor, out: torch.Tensor) -> None:
        """`out[t] = table[ids[t]]`; out `[T, H]`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """`out = x * rsqrt(mean(x^2) + eps) * weight` over the last dimension; `out` may be `x`.

        x, out: `[R, D]` or `[T, heads, D]`, rows may be strided.
        """

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """`residual += delta`, then `out = rms_norm(residual)`. All `[T, H]`."""

    def rope(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        *,
        offset: int = 0,
        interleaved: bool = False,
    ) -> None:
        """Rotates dims `offset .. offset + R` of each head of x `[T, heads, D]` in place; cos, sin `[P, R / 2]`."""

    def route(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        score: str = "softmax",
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool = True,
        eps: float = 0.0,
        scale: float = 1.0,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Chooses the top-k experts of each token: `proa.native.ops.route`."""
