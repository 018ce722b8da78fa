"""int8 integers with a bf16 scale per row and 128 inputs, as `proa convert` writes AMXINT8.

`weight` I8 `[out, in]`, `weight_scale` BF16 `[out, ceil(in / 128)]`.
"""

from __future__ import annotations

from proa.weights.formats import ROW_FORMATS
from proa.weights.raw_linear import RawLinear
from proa.weights.stored.tensors import LinearTensors, Storage

__all__ = ["STORAGE"]


def _read(tensors: LinearTensors) -> RawLinear:
    weight, shape = tensors.read_matrix("weight", ("I8",))
    scale = tensors.read_scales("weight_scale", ("BF16",), [ROW_FORMATS["int8_g128"].scale_shape(*shape)])
    return RawLinear("int8_g128", *shape, weight.data, scale.data)


STORAGE = Storage(
    ("weight", "weight_scale"),
    lambda tensors: tensors.dtype("weight") == "I8" and tensors.dtype("weight_scale") == "BF16",
    _read,
)
