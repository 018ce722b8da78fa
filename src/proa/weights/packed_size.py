"""What a stored tensor takes once it is packed, told by headers alone."""

from __future__ import annotations

import contextlib

from proa.native import _C
from proa.weights.checkpoint import Checkpoint
from proa.weights.linear import find_storage
from proa.weights.stored import LinearTensors

__all__ = ["packed_size"]

_CODES = (".weight", ".weight_packed")
_SCALES = ("weight_scale_inv", "weight_scale", "scale")


def packed_size(checkpoint: Checkpoint, name: str) -> int:
    """Bytes in memory of the tensor `name`, all that its linear takes beyond the file included.

    Kernel layouts have the size of what is stored but for the formats a `Storage` says grow. In a checkpoint that is
    only declared the dtype is the format. Rows that fill no 16 are not counted.
    """
    stored = checkpoint.nbytes(name)
    if not name.endswith(_CODES) or len(checkpoint.shape(name)) != 2:
        return stored
    rows, columns = checkpoint.shape(name)
    rows -= rows % 16
    tensors = LinearTensors(checkpoint, name.rpartition(".")[0])
    storage = find_storage(tensors)
    dtype = checkpoint.dtype(name)
    file_bytes = stored + sum(checkpoint.nbytes(f"{tensors.prefix}.{key}") for key in _SCALES if key in tensors)
    with contextlib.suppress(ValueError):  # a shape the format does not hold: loading says so
        if dtype in ("fp8_block128", "nvfp4"):
            return _C.packed_bytes(dtype, rows, columns)
        if storage.grows:
            columns *= 1 if storage.grows != "nvfp4" or dtype == "F4" else 2
            return stored + max(_C.packed_bytes(storage.grows, rows, columns) - file_bytes, 0)
    return stored
