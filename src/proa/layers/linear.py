"""Linear layers over packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proa.layers.parameters import ParameterReader
from proa.native import ops
from proa.native.ops import PackedWeight
from proa.native.runtime import CpuRuntime

__all__ = ["Linear"]


class Linear:
    """`out = x @ W.T (+ bias)` for `x` float32 `[T, in]`, `out` float32 `[T, out]`; both may have a row stride.

    W may be several linears of one input, stacked along the output (q, k and v). They are one packed weight where
    their formats allow it; otherwise each writes its own columns of `out`.
    """

    __slots__ = ("_bias", "_pool", "in_features", "out_features", "parts")

    def __init__(self, runtime: CpuRuntime, parts: Sequence[PackedWeight], bias: torch.Tensor | None = None) -> None:
        self._pool = runtime.pool
        self._bias = bias
        self.parts = tuple(parts)
        self.in_features: int = parts[0].in_features
        self.out_features: int = sum(part.out_features for part in parts)

    @classmethod
    def load(
        cls,
        reader: ParameterReader,
        names: Sequence[str],
        *,
        out_features: Sequence[int],
        in_features: int,
        bias: bool = False,
    ) -> Linear:
        """Reads `{name}.weight` (in any format) of each name and, with `bias`, `{name}.bias`."""
        parts = reader.pack(names, out_features, in_features)
        biases = [reader.vector(f"{n}.bias", rows) for n, rows in zip(names, out_features, strict=True)] if bias else []
        return cls(reader.runtime, parts, torch.cat(biases) if biases else None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(self.parts) == 1:
            ops.linear(self._pool, x, self.parts[0], out, bias=self._bias)
            return
        start = 0
        for part in self.parts:
            stop = start + part.out_features
            bias = None if self._bias is None else self._bias[start:stop]
            ops.linear(self._pool, x, part, out[:, start:stop], bias=bias)
            start = stop
