"""Linear layers over packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proa.device.backend import Weight
from proa.layers.parameters import ParameterReader

__all__ = ["Linear"]


class Linear:
    """`out = x @ W.T (+ bias)` for `x` float32 `[T, in]`, `out` float32 `[T, out]`; both may have a row stride.

    W may be several linears of one input, stacked along the output (q, k and v). They are one packed weight where
    their formats allow it; otherwise each writes its own columns of `out`.
    """

    __slots__ = ("_bias", "in_features", "out_features", "parts")

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> None:
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
        return cls(parts, reader.device.place(torch.cat(biases)) if biases else None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def forward(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        if len(self.parts) == 1:
            self.parts[0].forward(x, out, self._bias, accumulate)
            return
        start = 0
        for part in self.parts:
            stop = start + part.out_features
            bias = None if self._bias is None else self._bias[start:stop]
            part.forward(x, out[:, start:stop], bias, accumulate)
            start = stop
