"""The native quantizer against numpy's rules, bit for bit, and XXH64 against its specification."""

from __future__ import annotations

import numpy as np
import pytest

from proa.convert.requantize import EXACT, QuantizationError, empty_linear, requantize
from proa.core.errors import CheckpointError, UnsupportedError
from proa.native import _C
from proa.weights.quantize import dequantize, quantize
from proa.weights.raw_linear import RawLinear

TARGETS = ("bf16", "int4_g32", "int8_g128", "fp8_block128")
NATIVE_SOURCES = ("f32", "bf16", "int4_g32", "fp8_block128")
# Ragged blocks, one group, a group of int8 cut short, more than one block of rows.
SHAPES = ((1, 32), (5, 96), (130, 160), (256, 288))


def values_of(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Normal values of very different scales, with zeros, whole zero groups and ties."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-30, 6, size=shape))
    values[rng.random(shape) < 0.05] = 0.0
    values[:, :32][rng.random(shape[0]) < 0.3] = 0.0
    values[0, :8] = [7.5, -7.5, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0]
    return values.astype(np.float32)


def same(found: RawLinear, expected: RawLinear) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.tobytes() == b.tobytes())
        for a, b in ((found.data, expected.data), (found.scales, expected.scales))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", NATIVE_SOURCES)
def test_native_bits_are_those_of_numpy(source, to, shape):
    linear = quantize(values_of(shape), source)
    exact = dequantize(linear)
    found, error = requantize(linear, to, "w")
    expected = linear if source == to else quantize(exact, to)
    assert same(found, expected)
    difference = (exact - dequantize(expected)).astype(np.float64)
    count = difference.size
    # Sums of n rounded float64 squares in another order: n * 2^-52 of them, at most.
    assert error.squared_error == pytest.approx(np.square(difference).sum(), rel=count * 2.0**-52)
    assert error.max_abs == np.abs(difference).max()
    if source != to:
        assert error.squared_norm == pytest.approx(np.square(exact, dtype=np.float64).sum(), rel=count * 2.0**-52)


@pytest.mark.parametrize("to", TARGETS)
def test_tiny_and_huge_values(to):
    values = np.zeros((4, 128), np.float32)
    values[0] = 1e-45  # the smallest subnormal: scales round to 0
    values[1] = np.float32(2.0**-140) * np.arange(128)
    values[2, :64] = 3e38
    values[3] = -1e-38
    found, _ = requantize(RawLinear("f32", 4, 128, values, None), to, "w")
    with np.errstate(over="ignore"):
        assert same(found, quantize(values, to))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("to", TARGETS)
def test_weights_that_are_not_finite_are_refused_by_name(to, bad):
    values = values_of((130, 160))
    values[129, 159] = bad
    with pytest.raises(CheckpointError, match=r"model\.x.*finite weights"):
        requantize(RawLinear("f32", 130, 160, values, None), to, "model.x")


def test_values_beyond_bf16_are_refused():
    values = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    with pytest.raises(CheckpointError, match="beyond the range"):
        requantize(RawLinear("f32", 1, 32, values, None), "bf16", "w")


@pytest.mark.parametrize("source", ["f16", "mxfp4", "mxfp8", "nvfp4", "fp8_channel", "int8_g32_f16", "int4_g64"])
def test_other_sources_go_through_their_values(source):
    linear = quantize(values_of((16, 128)), source)
    found, error = requantize(linear, "int8_g128", "w")
    assert same(found, quantize(dequantize(linear), "int8_g128"))
    assert error.relative < 0.05


@pytest.mark.parametrize("group", [64, 128])
def test_int4_of_larger_groups_is_taken_over(group):
    linear = quantize(values_of((16, 256)), f"int4_g{group}")
    found, error = requantize(linear, "int4_g32", "w")
    assert error == EXACT
    assert np.array_equal(dequantize(found), dequantize(linear))


def test_int4_with_fp16_scales_keeps_its_integers():
    linear = quantize(values_of((16, 256)), "int4_g128_f16")
    found, error = requantize(linear, "int4_g32", "w")
    assert np.array_equal(found.data, linear.data)
    # bf16 has 8 significant bits: each scale moves by 2^-9 of itself at most.
    assert 0 < error.relative <= 2.0**-9
    assert error.max_abs == np.abs(dequantize(found) - dequantize(linear)).max()


@pytest.mark.parametrize("to", TARGETS)
def test_a_linear_in_the_format_already_is_not_touched(to):
    """Not even where its own scale would be another: twice the least, as other quantizers may choose."""
    linear = quantize(values_of((130, 160)), to)
    if linear.scales is not None:
        scales = linear.scales * 2 if to == "fp8_block128" else linear.scales + np.uint16(1 << 7)
        linear = RawLinear(to, 130, 160, linear.data, scales)
    found, error = requantize(linear, to, "w")
    assert found is linear and error == EXACT


def test_a_bias_goes_along():
    bias = np.arange(16, dtype=np.float32)
    linear = RawLinear("f32", 16, 128, values_of((16, 128)), None, bias=bias)
    for to in TARGETS:
        assert requantize(linear, to, "w")[0].bias is bias


@pytest.mark.parametrize("to", ["int4_g32", "int8_g128"])
def test_a_width_the_format_lacks_is_refused(to):
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        requantize(RawLinear("f32", 2, 48, np.ones((2, 48), np.float32), None), to, "w")


def test_totals_do_not_depend_on_order():
    rng = np.random.default_rng(1)
    parts = [QuantizationError(*map(float, rng.random(3) * 10.0 ** rng.integers(-20, 20))) for _ in range(200)]
    assert QuantizationError.total(parts) == QuantizationError.total(parts[::-1])
    assert QuantizationError.total([]) == EXACT and EXACT.relative == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("q4", "bf16"), "expected source"),
        (("f32", "int4_g64"), "expected target"),
        (("bf16", "bf16"), "dtype|float32|bf16"),
    ],
)
def test_the_binding_checks_its_arguments(arguments, message):
    result = empty_linear("bf16", (4, 32), bias=False)
    with pytest.raises((TypeError, ValueError), match=message):
        _C.quantize(arguments[0], np.ones((4, 32), np.float32), None, arguments[1], result.data, None)


def test_the_binding_checks_shapes():
    values = np.ones((4, 64), np.float32)
    small = np.empty((4, 31), np.uint8)
    with pytest.raises(ValueError, match="out_data"):
        _C.quantize("f32", values, None, "int4_g32", small, np.empty((4, 2), np.uint16))
    with pytest.raises(ValueError, match="out_scales"):
        _C.quantize("f32", values, None, "int4_g32", np.empty((4, 32), np.uint8), np.empty((4, 3), np.uint16))
    with pytest.raises(ValueError, match="scales"):
        _C.quantize("f32", values, None, "int4_g32", np.empty((4, 32), np.uint8), None)


def reference_xxh64(data: bytes) -> int:
    """The specification's steps, one by one, on Python integers."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
    mask = (1 << 64) - 1

    def rotl(x: int, n: int) -> int:
        x &= mask
        return (x << n | x >> (64 - n)) & mask

    def mix(lane: int, word: int) -> int:
        return rotl(lane + word * p2, 31) * p1 & mask

    position = 0
    if len(data) >= 32:
        lanes = [p1 + p2, p2, 0, -p1 & mask]
        while len(data) - position >= 32:
            for i in range(4):
                word = int.from_bytes(data[position + 8 * i : position + 8 * i + 8], "little")
                lanes[i] = mix(lanes[i], word)
            position += 32
        hash_ = sum(rotl(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for lane in lanes:
            hash_ = ((hash_ ^ mix(0, lane)) * p1 + p4) & mask
    else:
        hash_ = p5
    hash_ = (hash_ + len(data)) & mask
    while len(data) - position >= 8:
        word = int.from_bytes(data[position : position + 8], "little")
        hash_ = (rotl(hash_ ^ mix(0, word), 27) * p1 + p4) & mask
        position += 8
    if len(data) - position >= 4:
        word = int.from_bytes(data[position : position + 4], "little")
        hash_ = (rotl(hash_ ^ (word * p1 & mask), 23) * p2 + p3) & mask
        position += 4
    for byte in data[position:]:
        hash_ = rotl(hash_ ^ (byte * p5 & mask), 11) * p1 & mask
    hash_ = (hash_ ^ hash_ >> 33) * p2 & mask
    hash_ = (hash_ ^ hash_ >> 29) * p3 & mask
    return hash_ ^ hash_ >> 32


def test_xxh64_is_the_published_one():
    assert _C.xxh64(np.zeros(0, np.uint8)) == 0xEF46DB3751D8E999
    assert _C.xxh64(np.frombuffer(b"abc", np.uint8)) == 0x44BC2CF5AD770999
    data = np.random.default_rng(0).integers(0, 256, 300, np.uint8)
    for length in (*range(70), 128, 255, 300):
        assert _C.xxh64(data[:length]) == reference_xxh64(data[:length].tobytes()), length
