"""Linears and plain arrays in their stored format, checked against the shape the model expects.

Scales that are inf or NaN are refused: each would spoil a whole group of outputs. Subnormal scales are taken as they
are, and so are elements that are NaN or inf: only reading every weight would find them.
"""

from __future__ import annotations

import numpy as np

from proa.core.errors import CheckpointError
from proa.weights.checkpoint import Checkpoint
from proa.weights.formats import ROW_FORMATS
from proa.weights.raw_linear import RawLinear
from proa.weights.stored import STORAGES, LinearTensors, Storage
from proa.weights.stored.tensors import f32_values

__all__ = ["RawLinear", "check_declared", "find_storage", "linear_tensor_names", "read_array", "read_linear"]


def read_linear(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int] | None = None) -> RawLinear:
    """The linear `prefix` (without `.weight`), its format detected from the tensors present.

    `shape` is the `(out, in)` the model expects; None accepts any. CheckpointError for a missing tensor, another
    shape, a scale that does not fit, or a format other than quantization_config says; UnsupportedError for a way of
    storing that proa lacks.
    """
    tensors = LinearTensors(checkpoint, prefix, shape)
    linear = find_storage(tensors).read(tensors)
    check_declared(checkpoint, prefix, linear.format)
    return linear


def check_declared(checkpoint: Checkpoint, name: str, found: str) -> None:
    """CheckpointError when `name` is quantized and not in a format that quantization_config says."""
    declared = checkpoint.quantization.formats
    if declared is not None and found not in declared and not ROW_FORMATS[found].plain:
        expected = f"{' or '.join(sorted(declared))} as quantization_config says"
        raise CheckpointError(f"{checkpoint.path}: {name}", expected, found)


def linear_tensor_names(checkpoint: Checkpoint, prefix: str) -> list[str]:
    """Names of the stored tensors that belong to the linear `prefix`."""
    tensors = LinearTensors(checkpoint, prefix)
    return [f"{prefix}.{suffix}" for suffix in find_storage(tensors).suffixes if suffix in tensors]


def read_array(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float tensor as a float32 copy `[*shape]`. CheckpointError for another shape or a dtype that is no float."""
    tensor = checkpoint.tensor(name)
    if tensor.shape != shape:
        raise CheckpointError(checkpoint.where(name), f"shape {list(shape)}", list(tensor.shape))
    if tensor.dtype not in ("F32", "BF16", "F16"):
        raise CheckpointError(checkpoint.where(name), "dtype F32, BF16 or F16", tensor.dtype)
    return np.array(f32_values(tensor))


def find_storage(tensors: LinearTensors) -> Storage:
    """How a linear is stored, by names and types."""
    return next(storage for storage in STORAGES if storage.matches(tensors))
