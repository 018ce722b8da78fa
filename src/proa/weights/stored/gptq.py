"""GPTQ int4, symmetric and in order of the input: `sym` true, `desc_act` false.

`qweight` I32 `[in / 8, out]`, eight rows of a column from the least significant nibble up; `scales` F16 or BF16
`[in / group, out]`; `qzeros` I32 `[in / group, out / 8]`, every zero point 8, stored as 7 (checkpoint_format "gptq") or
8 ("gptq_v2"); `g_idx` I32 `[in]`, the group of each row.
"""

from __future__ import annotations

import numpy as np

from proa.core.errors import CheckpointError
from proa.weights.checkpoint import RawTensor
from proa.weights.quantization import INT4_GROUPS
from proa.weights.raw_linear import RawLinear
from proa.weights.stored.int4 import int4_linear
from proa.weights.stored.tensors import LinearTensors, Storage

__all__ = ["STORAGE"]

_ROWS_AT_ONCE = 64


def _read(tensors: LinearTensors) -> RawLinear:
    qweight, shape = _read_qweight(tensors)
    groups = [group for group in INT4_GROUPS if shape[1] % group == 0]
    if not groups:
        raise CheckpointError(tensors.where("qweight"), f"input features in groups of {INT4_GROUPS[0]}", shape[1])
    scales = tensors.read_scales("scales", ("F16", "BF16"), [(shape[1] // group, shape[0]) for group in groups])
    group = shape[1] // scales.shape[0]
    _check_zeros(tensors, (scales.shape[0], shape[0] // 8))
    if "g_idx" in tensors:
        order = tensors.read("g_idx", ("I32", "I64"))
        if not np.array_equal(order.data, np.arange(shape[1]) // group):
            raise tensors.unsupported("g_idx", f"groups that are not {group} inputs in order (desc_act)")
    by_output = RawTensor(scales.name, scales.dtype, scales.shape[::-1], np.ascontiguousarray(scales.data.T))
    return int4_linear(tensors, shape, _nibbles_by_output(qweight.data), by_output)


def _read_qweight(tensors: LinearTensors) -> tuple[RawTensor, tuple[int, int]]:
    qweight = tensors.read("qweight", ("I32",))
    shape = (qweight.shape[1], qweight.shape[0] * 8) if len(qweight.shape) == 2 else None
    if shape is None or 0 in shape or shape[0] % 8 or tensors.shape not in (None, shape):
        size = "[in / 8, out]" if tensors.shape is None else [tensors.shape[1] // 8, tensors.shape[0]]
        raise CheckpointError(tensors.where("qweight"), f"shape {size}, as GPTQ packs it", list(qweight.shape))
    return qweight, shape


def _check_zeros(tensors: LinearTensors, shape: tuple[int, int]) -> None:
    zeros = tensors.read("qzeros", ("I32",))
    if zeros.shape != shape:
        raise CheckpointError(tensors.where("qzeros"), f"shape {list(shape)}", list(zeros.shape))
    expected = tensors.checkpoint.quantization.gptq_zero
    allowed = (0x77, 0x88) if expected is None else (0x11 * expected,)
    stored = np.unique(zeros.data.view(np.uint8))
    if stored.size != 1 or stored[0] not in allowed:
        raise tensors.unsupported("qzeros", "zero points other than 8 (asymmetric)")


def _nibbles_by_output(qweight: np.ndarray) -> np.ndarray:
    """int32 `[in / 8, out]` -> uint8 `[out, in / 2]`: byte k of a word holds inputs 8w + 2k (low) and 8w + 2k + 1."""
    words = np.empty(qweight.shape[::-1], qweight.dtype)
    # Rows are a power of two apart, so a whole column falls into few sets of the cache: 15 times slower at once.
    for begin in range(0, qweight.shape[0], _ROWS_AT_ONCE):
        words[:, begin : begin + _ROWS_AT_ONCE] = qweight[begin : begin + _ROWS_AT_ONCE].T
    return words.view(np.uint8)


STORAGE = Storage(
    ("qweight", "scales", "qzeros", "g_idx"),
    lambda tensors: "qweight" in tensors,
    _read,
)
