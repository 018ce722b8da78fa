"""Whatever type, shape or bytes the tensors of a linear have: what is read is consistent, or the error is typed."""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Callable
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
EXAMPLES = 400
SEEDS = st.integers(0, 2**32 - 1)
SIDES = [0, 1, 2, 4, 5, 8, 16, 20, 32, 64, OUT // 8, OUT, IN // 8, IN // 2, IN]
EXTRA = ["weight", "weight_scale", "scale", "qweight", "weight_packed", "scales"]


def lying(tensors: Tensors, rng: random.Random) -> Tensors:
    """One or two tensors missing, of another type, shape or content, or one more."""
    tensors = dict(tensors)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(sorted(tensors))
        honest = tensors[name]
        match rng.choice(["missing", "type", "shape", "bits", "extra"]):
            case "missing" if len(tensors) > 1:
                del tensors[name]
            case "type":
                tensors[name] = zeros(list(honest.shape), rng.choice(DTYPES))
            case "shape":
                # The library cannot save every shape of F4.
                dtype = torch.uint8 if honest.dtype == torch.float4_e2m1fn_x2 else honest.dtype
                tensors[name] = zeros([rng.choice(SIDES) for _ in range(rng.randint(0, 4))], dtype)
            case "extra":
                tensors[rng.choice(EXTRA)] = honest.clone()
            case _:
                stored = torch.full((honest.numel() * honest.itemsize,), rng.randint(0, 255), dtype=torch.uint8)
                tensors[name] = stored.view(honest.dtype).reshape(honest.shape)
    return tensors


def zeros(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    while math.prod(shape) > 1 << 20:
        shape.pop()
    return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)


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


@settings(max_examples=EXAMPLES, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), seed=SEEDS)
def test_linears(name: str, seed: int) -> None:
    rng = random.Random(seed)
    tensors = lying(tensors_of(name), rng)
    shape = rng.choice([None, (OUT, IN)])
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


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(honest=st.sampled_from([fused, gpt_oss_blocks]), seed=SEEDS)
def test_fused_experts(honest: Callable[[], Tensors], seed: int) -> None:
    tensors = honest()
    prefix = next(iter(tensors)).rsplit(".", 1)[0]
    suffixes = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}
    short = lying(suffixes, random.Random(seed))
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
