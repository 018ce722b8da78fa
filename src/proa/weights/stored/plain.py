"""Unquantized weights."""

from __future__ import annotations

import numpy as np

from proa.weights.raw_linear import RawLinear
from proa.weights.stored.tensors import LinearTensors, Storage

__all__ = ["STORAGE"]

_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


def _read(tensors: LinearTensors) -> RawLinear:
    if tensors.dtype("weight") not in (None, *_FORMATS):
        raise tensors.unsupported("weight", f"weights of dtype {tensors.dtype('weight')}")
    weight, (out_features, in_features) = tensors.read_matrix("weight", tuple(_FORMATS))
    data = weight.data.view(np.uint16) if weight.dtype == "F16" else weight.data
    return RawLinear(_FORMATS[weight.dtype], out_features, in_features, data, None)


STORAGE = Storage(("weight",), lambda _tensors: True, _read)
