"""Whatever type, shape or bytes the tensors of a linear have: what is read is consistent, or the error is typed."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_checkpoint_experts import SIZES, fused, gpt_oss_blocks, write
from tests.unit.test_stored_linears import CASES, IN, OUT, Tensors, open_with

from proa.core.errors import CheckpointError, UnsupportedError
from proa.weights.experts import read_experts
from proa.weights.formats import ROW_FORMATS
from proa.weights.linear import RawLinear, linear_tensor_names, read_linear

DTYPES = [
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
SIDES = st.sampled_from([0, 1, 2, 4, 5, 8, 16, 20, 32, 64, OUT // 8, OUT, IN // 8, IN // 2, IN])

SHAPES = st.lists(SIDES, max_size=4).filter(lambda shape: math.prod(shape) <= 1 << 20)


@st.composite
def lying(draw: st.DrawFn, tensors: Tensors) -> Tensors:
    """One or two tensors missing, or of another type, shape or content."""
    tensors = dict(tensors)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        honest = tensors[name]
        fault = draw(st.sampled_from(["missing", "type", "shape", "bits", "extra"]))
        if fault == "missing" and len(tensors) > 1:
            del tensors[name]
        elif fault == "extra":
            extra = draw(st.sampled_from(["weight", "weight_scale", "scale", "qweight", "weight_packed", "scales"]))
            tensors[extra] = honest.clone()
        elif fault == "bits":
            stored = torch.full((honest.numel() * honest.itemsize,), draw(st.integers(0, 255)), dtype=torch.uint8)
            tensors[name] = stored.view(honest.dtype).reshape(honest.shape)
        else:
            dtype = draw(st.sampled_from(DTYPES)) if fault == "type" else honest.dtype
            shape = draw(SHAPES) if fault == "shape" else list(honest.shape)
            tensors[name] = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)
    return tensors


@functools.cache
def tensors_of(name: str) -> Tensors:
    return CASES[name]().tensors


def check(linear: RawLinear) -> None:
    row_format = ROW_FORMATS[linear.format]
    columns = linear.in_features // 2 if row_format.nibbles else linear.in_features
    assert linear.data.shape == (linear.out_features, columns)
    if linear.scales is not None:
        assert linear.scales.shape == row_format.scale_shape(linear.out_features, linear.in_features)
    assert linear.global_scale > 0


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_linears(data: st.DataObject) -> None:
    tensors = data.draw(lying(tensors_of(data.draw(st.sampled_from(sorted(CASES))))))
    shape = (OUT, IN) if data.draw(st.booleans()) else None
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = open_with(Path(directory), tensors)
        linear_tensor_names(checkpoint, "p")
        try:
            linear = read_linear(checkpoint, "p", shape)
        except (CheckpointError, UnsupportedError) as error:
            if directory not in str(error) or "p." not in str(error):
                raise
            return
        check(linear)
        assert shape in (None, (linear.out_features, linear.in_features))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fused_experts(data: st.DataObject) -> None:
    honest = data.draw(st.sampled_from([fused, gpt_oss_blocks]))()
    names = {name.rsplit(".", 1)[1]: name for name in honest}
    prefix = next(iter(honest)).rsplit(".", 1)[0]
    short = data.draw(lying({suffix: honest[name] for suffix, name in names.items()}))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write(Path(directory), {f"{prefix}.{suffix}": tensor for suffix, tensor in short.items()})
        try:
            experts = read_experts(checkpoint, 1, **SIZES)
        except (CheckpointError, UnsupportedError) as error:
            if directory not in str(error):
                raise
            return
        for expert in experts:
            for linear in (expert.gate, expert.up, expert.down):
                check(linear)
