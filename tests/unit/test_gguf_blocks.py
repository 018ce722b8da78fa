"""Every GGML type as one of our formats, against the `gguf` package's dequantizer."""

from __future__ import annotations

import builtins

import gguf
import numpy as np
import pytest

from proa.core.errors import UnsupportedError
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.gguf_blocks import NATIVE, check_readable, common_format, dequantize, to_linear
from proa.weights.gguf_types import GGML_TYPES, GgmlType
from proa.weights.quantize import dequantize as value_of

BY_NAME = {item.name: item for item in GGML_TYPES.values()}
UNREADABLE = {"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"}
READABLE = sorted(BY_NAME.keys() - UNREADABLE)
BF16_HALF_STEP = 2.0**-8  # round to nearest with 8 significant bits: half a unit in the last place
BF16_LEAST_STEP = 2.0**-133  # subnormal


def random_blocks(ggml_type: GgmlType, rows: int = 6, blocks: int = 2, seed: int = 0) -> np.ndarray:
    """Any bytes are valid blocks; most of the float numbers in them are finite."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, blocks * ggml_type.block_bytes), np.uint8)


def oracle(ggml_type: GgmlType, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[ggml_type.name]).astype(np.float32)


def q4_0(rows: int, blocks: int, *, scale_bits: int) -> np.ndarray:
    """Random Q4_0 whose fp16 scales have `scale_bits` fraction bits and any exponent, subnormal ones too."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (rows, blocks, 18), np.uint8)
    scales = rng.integers(0, 0x7C00, (rows, blocks), np.uint16) & np.uint16(0xFFFF << (10 - scale_bits) & 0xFFFF)
    scales |= rng.integers(0, 2, scales.shape, np.uint16) << np.uint16(15)
    raw[:, :, :2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", READABLE)
def test_bf16_is_the_nearest_to_the_dequantized_value(name: str) -> None:
    ggml_type, blocks = BY_NAME[name], random_blocks(BY_NAME[name])
    check_readable(ggml_type, "here")
    exact = oracle(ggml_type, blocks)
    assert np.array_equal(dequantize(ggml_type, blocks), exact, equal_nan=True)
    if name in ("F32", "F16"):  # never rounded: they stay f32
        return
    linear = to_linear(ggml_type, blocks, "bf16")
    assert (linear.format, linear.out_features, linear.in_features) == ("bf16", *exact.shape)
    value = value_of(linear)
    finite = np.isfinite(exact) & (np.abs(exact) < np.float32(3e38))  # above, bf16 rounds to inf
    assert np.array_equal(np.isnan(value), np.isnan(exact))
    error = np.abs(value.astype(np.float64) - exact.astype(np.float64))[finite]
    assert (error <= np.maximum(BF16_HALF_STEP * np.abs(exact[finite]), BF16_LEAST_STEP)).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_types_are_exact_and_copy_nothing_they_need_not(name: str) -> None:
    ggml_type, blocks = BY_NAME[name], random_blocks(BY_NAME[name], blocks=64)
    chosen = common_format([(ggml_type, blocks)])
    linear = to_linear(ggml_type, blocks, chosen)
    assert linear.format == NATIVE[name].format == chosen
    assert np.array_equal(value_of(linear), oracle(ggml_type, blocks), equal_nan=True)
    assert np.shares_memory(linear.data, blocks) == (name != "F16")


def test_misaligned_floats_are_copied_into_alignment() -> None:
    raw = np.frombuffer(b"\0" + np.arange(8, dtype="<f4").tobytes(), np.uint8)[1:].reshape(2, 16)
    linear = to_linear(BY_NAME["F32"], raw, "f32")
    assert linear.data.flags.aligned
    assert linear.data.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_q4_0_with_scales_of_bf16_is_repacked_bit_for_bit() -> None:
    ggml_type, blocks = BY_NAME["Q4_0"], q4_0(40, 3, scale_bits=7)
    assert common_format([(ggml_type, blocks)]) == "int4_g32"
    linear = to_linear(ggml_type, blocks, "int4_g32")
    assert linear.data.shape == (40, 48)
    assert linear.scales is not None
    assert linear.scales.shape == (40, 3)
    assert np.array_equal(value_of(linear), oracle(ggml_type, blocks))


@pytest.mark.parametrize("scale", [0x3C01, 0x0401, 0x01FF, 0x7C00, 0x7E00])
def test_a_single_scale_bf16_cannot_hold_makes_q4_0_bf16(scale: int) -> None:
    ggml_type, blocks = BY_NAME["Q4_0"], q4_0(3000, 24, scale_bits=7)  # more than one step of the check
    assert common_format([(ggml_type, blocks)]) == "int4_g32"
    blocks[-1, -18:-16] = np.frombuffer(np.uint16(scale).tobytes(), np.uint8)
    assert common_format([(ggml_type, blocks)]) == "bf16"
    expected = bf16_from_f32(oracle(ggml_type, blocks))
    assert np.array_equal(to_linear(ggml_type, blocks, "bf16").data, expected)


def test_subnormal_scales_are_exact_where_few_bits_are_set() -> None:
    blocks = q4_0(1, 1, scale_bits=7)
    blocks[0, :2] = [0xFF, 0]  # 255 * 2^-24: eight bits, which bf16 holds although the low ones are set
    assert common_format([(BY_NAME["Q4_0"], blocks)]) == "int4_g32"
    assert np.array_equal(value_of(to_linear(BY_NAME["Q4_0"], blocks, "int4_g32")), oracle(BY_NAME["Q4_0"], blocks))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("F32", "F32"), "f32"),
        (("BF16", "BF16"), "bf16"),
        (("BF16", "F32"), "f32"),
        (("Q4_0", "Q4_0"), "int4_g32"),
        (("Q4_0", "Q6_K"), "bf16"),
        (("Q4_0", "F16"), "f32"),
        (("Q4_K", "Q6_K"), "bf16"),
    ],
)
def test_tensors_that_share_a_format_share_one_that_degrades_no_float(names: tuple[str, ...], chosen: str) -> None:
    tensors = [(BY_NAME[n], q4_0(4, 8, scale_bits=7) if n == "Q4_0" else random_blocks(BY_NAME[n])) for n in names]
    assert common_format(tensors) == chosen
    for ggml_type, blocks in tensors:
        exact = oracle(ggml_type, blocks)
        expected = exact if chosen != "bf16" else f32_from_bf16(bf16_from_f32(exact))
        assert np.array_equal(value_of(to_linear(ggml_type, blocks, chosen)), expected, equal_nan=True)


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_types_nobody_can_read_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"\[here\].*got {name}\."):
        check_readable(BY_NAME[name], "here")


def test_without_the_gguf_package_float_types_and_a_clear_error_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gguf(name: str, *args: object, **kwargs: object) -> object:
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(UnsupportedError, match="pip install gguf"):
        check_readable(BY_NAME["Q4_K"], "here")
    check_readable(BY_NAME["BF16"], "here")
    assert dequantize(BY_NAME["BF16"], np.zeros((1, 4), np.uint8)).shape == (1, 2)
