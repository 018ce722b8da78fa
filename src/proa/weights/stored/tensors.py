"""The tensors of one stored linear, checked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from proa.core.errors import CheckpointError, UnsupportedError
from proa.weights.bfloat16 import f32_from_bf16
from proa.weights.checkpoint import Checkpoint, RawTensor
from proa.weights.float_codes import E8M0_NAN
from proa.weights.quantization import SUPPORTED_QUANTIZATION
from proa.weights.raw_linear import RawLinear

__all__ = ["LinearTensors", "Storage", "check_finite", "f32_values"]


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """Tensors `{prefix}.{suffix}` of a linear; `shape` is the `(out, in)` the model expects, None for any."""

    checkpoint: Checkpoint
    prefix: str
    shape: tuple[int, int] | None = None

    def __contains__(self, suffix: str) -> bool:
        return f"{self.prefix}.{suffix}" in self.checkpoint

    def dtype(self, suffix: str) -> str | None:
        """As the file spells it; None for a tensor that is not there."""
        return self.checkpoint.dtype(f"{self.prefix}.{suffix}") if suffix in self else None

    def where(self, suffix: str) -> str:
        return self.checkpoint.where(f"{self.prefix}.{suffix}")

    def first(self, *suffixes: str) -> str:
        """The first suffix there is a tensor for, or the first of all, so that reading it names what is missing."""
        return next((suffix for suffix in suffixes if suffix in self), suffixes[0])

    def read(self, suffix: str, dtypes: Sequence[str]) -> RawTensor:
        """CheckpointError when it is missing or has another type."""
        tensor = self.checkpoint.tensor(f"{self.prefix}.{suffix}")
        if tensor.dtype not in dtypes:
            raise CheckpointError(self.where(suffix), f"dtype {' or '.join(dtypes)}", tensor.dtype)
        return tensor

    def read_matrix(self, suffix: str, dtypes: Sequence[str], per_item: int = 1) -> tuple[RawTensor, tuple[int, int]]:
        """A weight `[out, in / per_item]` and its `(out, in)`, which has to be `shape`."""
        tensor = self.read(suffix, dtypes)
        size = (tensor.shape[0], tensor.shape[1] * per_item) if len(tensor.shape) == 2 else None
        if size is None or 0 in size or self.shape not in (None, size):
            expected = "a matrix" if self.shape is None else f"shape {_packed_shape(self.shape, per_item)}"
            raise CheckpointError(self.where(suffix), expected, list(tensor.shape))
        return tensor, size

    def read_scales(self, suffix: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> RawTensor:
        """CheckpointError for another type or shape, and for a scale that is not finite."""
        tensor = self.read(suffix, dtypes)
        if tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(self.where(suffix), f"shape {expected}", list(tensor.shape))
        check_finite(self.checkpoint, tensor)
        return tensor

    def unsupported(self, suffix: str, got: str) -> UnsupportedError:
        return UnsupportedError(self.where(suffix), f"one of: {'; '.join(SUPPORTED_QUANTIZATION)}", got)


@dataclass(frozen=True, slots=True)
class Storage:
    """A way to store a linear. `matches` looks at names and types only; `read` raises CheckpointError for a fault.

    `suffixes`: of all tensors that belong to the linear, those it reads and those (scales of activations) it may leave.
    `grows`: its format where panels of 16 rows have scales that the file has once for more rows; "" for others.
    """

    suffixes: tuple[str, ...]
    matches: Callable[[LinearTensors], bool]
    read: Callable[[LinearTensors], RawLinear]
    grows: str = ""


def f32_values(tensor: RawTensor) -> np.ndarray:
    """A BF16, F16 or F32 tensor as float32, exact; F32 is a view."""
    if tensor.dtype == "BF16":
        return f32_from_bf16(tensor.data)
    assert tensor.dtype in ("F32", "F16"), tensor.dtype
    return np.asarray(tensor.data, np.float32)


def _packed_shape(shape: tuple[int, int], per_item: int) -> list[int]:
    return [shape[0], shape[1] // per_item]


# By type: the bits without the sign, and the smallest of them that are not finite.
_NON_FINITE_BITS = {
    "BF16": (0x7FFF, 0x7F80),
    "F16": (0x7FFF, 0x7C00),
    "F32": (0x7FFFFFFF, 0x7F800000),
    "F8_E4M3": (0x7F, 0x7F),
    "F8_E8M0": (0xFF, E8M0_NAN),
    "U8": (0xFF, E8M0_NAN),
}


def check_finite(checkpoint: Checkpoint, scales: RawTensor) -> None:
    """CheckpointError when a scale of this tensor (or part of one) is inf or NaN."""
    bits = scales.data.view(f"u{scales.data.itemsize}")
    magnitude, non_finite = _NON_FINITE_BITS[scales.dtype]
    if (bits & bits.dtype.type(magnitude)).max(initial=0) >= non_finite:
        raise CheckpointError(checkpoint.where(scales.name), "finite scales", "an inf or NaN")
