"""Every GGML type as one of our formats, against the `gguf` package's dequantizer."""

from __future__ import annotations

import builtins

import gguf
import numpy as np
import pytest

from proa.core.errors import UnsupportedError
from proa.gguf.types import GGML_TYPES, GgmlType
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.gguf_blocks import NATIVE, check_readable, common_format, dequantize, to_linear
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


@pytest.mark.parametrize("name", READABLE)
def test_types_are_dequantized_as_the_package_does_and_rounded_to_the_nearest_bf16(name: str) -> None:
    ggml_type, blocks = BY_NAME[name], random_blocks(BY_NAME[name])
    check_readable(ggml_type, "here")
    exact = oracle(ggml_type, blocks)
    assert np.array_equal(dequantize(ggml_type, blocks), exact, equal_nan=True)
    linear = to_linear(ggml_type, blocks, "bf16")
    assert (linear.format, linear.out_features, linear.in_features) == ("bf16", *exact.shape)
    value = value_of(linear)
    finite = np.isfinite(exact) & (np.abs(exact) < np.float32(3e38))  # above, bf16 rounds to inf
    assert np.array_equal(np.isnan(value), np.isnan(exact))
    error = np.abs(value.astype(np.float64) - exact.astype(np.float64))[finite]
    assert (error <= np.maximum(BF16_HALF_STEP * np.abs(exact[finite]), BF16_LEAST_STEP)).all()


@pytest.mark.parametrize("name", NATIVE)
def test_native_types_are_views_of_the_file(name: str) -> None:
    ggml_type, blocks = BY_NAME[name], random_blocks(BY_NAME[name], blocks=64)
    linear = to_linear(ggml_type, blocks, common_format([ggml_type]))
    assert linear.format == NATIVE[name].format
    assert (linear.out_features, linear.in_features) == (6, 64 * ggml_type.block_elements)
    assert np.shares_memory(linear.data, blocks)
    assert linear.scales is None
    if name in ("F32", "F16", "BF16"):
        assert linear.layout == "rows"
        assert np.array_equal(value_of(linear), oracle(ggml_type, blocks), equal_nan=True)
    else:
        assert linear.layout == "ggml"
        assert linear.data is blocks


def test_misaligned_floats_are_copied_into_alignment() -> None:
    raw = np.frombuffer(b"\0" + np.arange(8, dtype="<f4").tobytes(), np.uint8)[1:].reshape(2, 16)
    linear = to_linear(BY_NAME["F32"], raw, "f32")
    assert linear.data.flags.aligned
    assert linear.data.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("F32", "F32"), "f32"),
        (("F16", "F16"), "f16"),
        (("BF16", "BF16"), "bf16"),
        (("BF16", "F32"), "f32"),
        (("F16", "BF16"), "f32"),
        (("Q4_0", "Q4_0"), "int4_g32_f16"),
        (("Q4_0", "Q6_K"), "bf16"),
        (("Q4_0", "F16"), "f32"),
        (("Q4_K", "Q6_K"), "bf16"),
        (("IQ4_NL", "IQ4_NL"), "iq4_nl"),
        (("IQ4_XS", "IQ4_XS"), "bf16"),
        (("IQ4_NL", "IQ2_S"), "bf16"),
    ],
)
def test_tensors_that_share_a_format_share_one_that_degrades_no_float(names: tuple[str, ...], chosen: str) -> None:
    assert common_format([BY_NAME[name] for name in names]) == chosen
    if chosen in ("f32", "bf16"):
        for ggml_type in (BY_NAME[name] for name in names):
            blocks = random_blocks(ggml_type, blocks=4)
            exact = oracle(ggml_type, blocks)
            expected = exact if chosen == "f32" else f32_from_bf16(bf16_from_f32(exact))
            assert np.array_equal(value_of(to_linear(ggml_type, blocks, chosen)), expected, equal_nan=True)


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_types_nobody_can_read_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"\[here\].*got {name}\."):
        check_readable(BY_NAME[name], "here")


def test_without_the_gguf_package_native_types_and_a_clear_error_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gguf(name: str, *args: object, **kwargs: object) -> object:
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(UnsupportedError, match="pip install gguf"):
        check_readable(BY_NAME["IQ4_XS"], "here")
    for name in NATIVE:
        check_readable(BY_NAME[name], "here")
    assert dequantize(BY_NAME["BF16"], np.zeros((1, 4), np.uint8)).shape == (1, 2)
