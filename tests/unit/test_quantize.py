"""The codes and quantizers of every format: equal to torch and compressed-tensors, errors of at most half a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from proa.weights import quantize as quantize_module
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.float_codes import (
    e2m1_from_f32,
    e4m3_from_f32,
    e8m0_from_f32,
    f32_from_e2m1,
    f32_from_e4m3,
    f32_from_e8m0,
)
from proa.weights.formats import ROW_FORMATS
from proa.weights.quantize import dequantize, pack_nibbles, quantize, unpack_nibbles


def random_weight(out_features: int, in_features: int) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(3))


float_bits = st.integers(0, (1 << 32) - 1)


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.uint32, st.integers(1, 64), elements=float_bits))
def test_bf16_rounding_equals_torch(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    ours = bf16_from_f32(values)
    theirs = torch.from_numpy(values.copy()).bfloat16()
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs.view(torch.uint16).numpy()[~nan])
    assert np.isnan(f32_from_bf16(ours)[nan]).all()


def test_every_bf16_survives_the_round_trip() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = f32_from_bf16(bits)
    finite = ~np.isnan(values)
    assert np.array_equal(bf16_from_f32(values)[finite], bits[finite])


def test_e4m3_decoding_equals_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(f32_from_e4m3(codes), theirs, equal_nan=True)


@settings(max_examples=300, deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 64), elements=st.floats(-448, 448, width=32)))
def test_e4m3_encoding_equals_torch(values: np.ndarray) -> None:
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_from_f32(values), theirs)


def test_e4m3_encoding_of_midpoints_and_out_of_range() -> None:
    grid = f32_from_e4m3(np.arange(0x7F, dtype=np.uint8))
    middle = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate([middle, -middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9)]).astype(np.float32)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_from_f32(values), theirs)
    outside = e4m3_from_f32(np.array([1e9, -np.inf, np.nan], np.float32))
    assert f32_from_e4m3(outside[:2]).tolist() == [448.0, -448.0]
    assert np.isnan(f32_from_e4m3(outside[2:]))[0]


def test_int4_scales_and_packing_equal_compressed_tensors() -> None:
    weight = random_weight(48, 256) * torch.logspace(-3, 2, 48)[:, None]
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    groups = weight.reshape(48, -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    ours = quantize(weight.numpy(), "int4_g32")
    assert ours.scales is not None
    assert np.array_equal(ours.scales, scale.bfloat16().view(torch.uint16).numpy())
    expanded = scale.bfloat16().float().repeat_interleave(32, 1)
    quants = (weight / expanded).round().clamp(-8, 7).to(torch.int8)
    assert np.array_equal(ours.data, pack_to_int32(quants, 4).view(torch.uint8).numpy())


def test_int4_error_is_at_most_half_a_step() -> None:
    weight = random_weight(64, 128).numpy()
    weight[0] = 0
    linear = quantize(weight, "int4_g32")
    assert linear.scales is not None
    step = np.repeat(f32_from_bf16(linear.scales), 32, axis=1)
    # Clamping at 7 can cost another half step at the positive end (absmax / 7.5 puts it at 7.5); bf16 rounds the
    # scale by 2^-9 of its size, which moves the end by 7.5 * 2^-9 steps.
    assert (np.abs(dequantize(linear) - weight) <= step * (0.5 + 7.5 * 2**-8)).all()
    assert (dequantize(linear)[0] == 0).all()


@pytest.mark.parametrize("shape", [(128, 256), (576, 130), (1, 1), (129, 127)])
def test_fp8_error_is_at_most_half_a_step(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape).numpy()
    linear = quantize(weight, "fp8_block128")
    assert linear.scales is not None
    assert linear.scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = np.repeat(np.repeat(linear.scales, 128, 0)[: shape[0]], 128, 1)[:, : shape[1]]
    # Three mantissa bits: half a unit in the last place is 2^-4 of the value; below 2^-6 the step is 2^-9. The two
    # float32 roundings (division, multiplication) add 2^-22 of it.
    bound = np.maximum(np.abs(weight) * 2**-4, scale * 2**-10) * (1 + 2**-20)
    assert (np.abs(dequantize(linear) - weight) <= bound).all()


def test_fp8_block_of_zeros() -> None:
    assert (dequantize(quantize(np.zeros((3, 200), np.float32), "fp8_block128")) == 0).all()


def test_e2m1_equals_compressed_tensors() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    theirs = unpack_fp4_from_uint8(torch.from_numpy(packed), 2, 256, torch.float32).numpy()
    ours = f32_from_e2m1(unpack_nibbles(packed))
    assert np.array_equal(ours, theirs)
    assert np.array_equal(np.signbit(ours), np.signbit(theirs))  # -0 too
    assert np.array_equal(pack_nibbles(e2m1_from_f32(ours)), packed)
    assert np.array_equal(pack_nibbles(e2m1_from_f32(ours)), pack_fp4_to_uint8(torch.from_numpy(ours)).numpy())


def test_e2m1_rounds_to_the_nearest_and_ties_to_even() -> None:
    grid = f32_from_e2m1(np.arange(8, dtype=np.uint8)).astype(np.float64)
    middle = (grid[1:] + grid[:-1]) / 2
    even = grid[[0, 2, 2, 4, 4, 6, 6]]  # the neighbour with an even code
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, 9), [7.0, 1e9, 0.0]])
    expected = np.concatenate([even, grid[:-1], grid[1:], [6.0, 6.0, 0.0]])
    assert np.array_equal(f32_from_e2m1(e2m1_from_f32(values)), expected)
    assert np.array_equal(f32_from_e2m1(e2m1_from_f32(-values)), -expected)


def test_e8m0_decoding_equals_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(f32_from_e8m0(codes), theirs, equal_nan=True)
    assert np.array_equal(e8m0_from_f32(theirs[:255]), codes[:255])


def test_e8m0_encoding_rounds_up() -> None:
    powers = f32_from_e8m0(np.arange(1, 254, dtype=np.uint8))
    above = np.nextafter(powers, np.float32(np.inf))
    assert np.array_equal(f32_from_e8m0(e8m0_from_f32(above)), 2 * powers)
    assert f32_from_e8m0(e8m0_from_f32(np.array([1e-45, 3e38], np.float32))).tolist() == [2.0**-127, 2.0**127]


# The largest distance of neighbouring elements next to a value x, both in units of the scale, and what the rounding of
# the scale adds: elements that a scale rounded down leaves beyond the largest code.
HALF_STEP = {
    "int4": lambda x: np.full_like(x, 0.5),
    "int8": lambda x: np.full_like(x, 0.5),
    "e4m3": lambda x: np.maximum(np.abs(x) * 2.0**-4, 2.0**-10),
    "e2m1": lambda x: np.select([np.abs(x) <= 2, np.abs(x) <= 4], [0.25, 0.5], 1.0),
}
SCALE_ROUNDING = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22, "e8m0": 2.0**-22, "e4m3": 2.0**-4}
TOP = {"int4": 8, "int8": 127, "e4m3": 464, "e2m1": 7}


@pytest.mark.parametrize("name", [name for name, row_format in ROW_FORMATS.items() if not row_format.plain])
def test_no_element_is_off_by_more_than_half_a_step(name: str) -> None:
    row_format = ROW_FORMATS[name]
    columns = 384 + (32 if row_format.ragged else 0)
    weight = random_weight(160, columns).numpy() * np.logspace(-3, 2, 160, dtype=np.float32)[:, None]
    weight[5] = 0
    linear = quantize(weight, name)
    assert linear.scales is not None
    assert linear.scales.shape == row_format.scale_shape(160, columns)
    values = dequantize(linear)
    assert (values[5] == 0).all()
    step = np.abs(dequantize_ones(linear, weight.shape))
    ratio = np.divide(weight, step, out=np.zeros_like(weight), where=step > 0)
    bound = step * (HALF_STEP[row_format.element](ratio) + TOP[row_format.element] * SCALE_ROUNDING[row_format.scale])
    # Groups whose e4m3 scale is subnormal have scales that are off by more, up to half of the smallest one.
    bound += 2.0**-10 * linear.global_scale * TOP[row_format.element] * row_format.global_scale
    assert (np.abs(values - weight) <= bound).all()


def dequantize_ones(linear, shape: tuple[int, int]) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The scale of every element, by decoding a weight of ones."""
    ones = quantize(np.ones(shape, np.float32), linear.format)
    one = {"int4": 0x99, "int8": 1, "e4m3": 0x38, "e2m1": 0x22}[ROW_FORMATS[linear.format].element]
    return dequantize(replace(linear, data=np.full_like(ones.data, one)))


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_size(name: str) -> None:
    linear = quantize(np.ones((256, 1024), np.float32), name)
    rows = 4 * 256 if name == "fp8_channel" else 0
    assert linear.nbytes - rows == ROW_FORMATS[name].bytes_per_element * 256 * 1024


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_parts_of_a_large_weight_equal_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(300, 256).numpy()
    whole = quantize(weight, name)
    monkeypatch.setattr(quantize_module, "_CHUNK_ROWS", 128)
    parts = quantize(weight, name)
    assert np.array_equal(parts.data, whole.data)
    assert np.array_equal(parts.scales, whole.scales) if whole.scales is not None else parts.scales is None
