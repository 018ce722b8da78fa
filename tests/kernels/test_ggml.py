"""GGUF blocks in the kernels: their values against the `gguf` package, products against float64."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.ggml_blocks import BLOCK_TYPES, HALVES, TYPES, BlockCase, any_blocks, values_of
from tests.kernels.weight_cases import EPS, quantized

from proa.native import _C
from proa.native.ops import PackedWeight, ThreadPool, linear
from proa.weights.gguf_blocks import NATIVE, to_linear

WITH_MINIMUM = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
SHAPES = [(1, 256), (16, 512), (37, 768), (130, 1024)]


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_packed_blocks_have_the_values_of_the_gguf_package(name: str, rows: int, columns: int, pool: ThreadPool):
    """Exactly: scale x sub-scale x code fits in a float32, so only the difference to the minimum is rounded, once."""
    blocks = any_blocks(name, rows, columns, np.random.default_rng(rows))
    expected = values_of(name, blocks)
    if name == "MXFP4":  # the package has no NaN among E8M0 numbers, the standard (OCP MX 1.0) has one
        expected[np.repeat(blocks[:, ::17] == 255, 32, axis=1)] = np.nan
    packed = PackedWeight.pack(pool, to_linear(TYPES[name], blocks, NATIVE[name].format))
    assert np.array_equal(packed.dequantize(), expected, equal_nan=True)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packing_adds_less_than_four_percent(name: str, pool: ThreadPool):
    """Q3_K's sixteen 6-bit scales take a byte each, 3.6 %; the others are closer."""
    blocks = any_blocks(name, 64, 2048, np.random.default_rng(0))
    packed = PackedWeight.pack(pool, to_linear(TYPES[name], blocks, NATIVE[name].format))
    assert blocks.nbytes <= packed.nbytes <= 1.04 * blocks.nbytes
    assert packed.nbytes == _C.packed_bytes(NATIVE[name].format, 64, 2048)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_products_are_those_of_the_quantized_activations(name: str, tokens: int, pool: ThreadPool):
    """One accumulator per output, at most three steps per 16 columns, each rounded relative to the terms so far."""
    rng = np.random.default_rng(tokens)
    case = BlockCase.make(name, 37, 768, rng)
    x = rng.standard_normal((tokens, 768)).astype(np.float32)
    x[:, ::50] *= 30
    if name in WITH_MINIMUM:  # what rounding leaves of sums of x has terms of its own (grouped_test.cc): leaves nothing
        x = rng.integers(-126, 127, x.shape).astype(np.float32)
        x[:, ::32] = 127
    out = np.empty((tokens, 37), np.float32)
    linear(pool, x, PackedWeight.pack(pool, case.linear), out)
    rounded, error = quantized(x.astype(np.float64))
    steps = (3 * 768 / 16 + 4) * EPS
    bound = (np.abs(rounded) * steps + error) @ case.magnitude.T
    assert (np.abs(out - rounded @ case.values.T) <= bound).all()
    assert (np.abs(out) > 100 * bound).mean() > 0.5


@pytest.mark.parametrize("fill", [0x00, 0xFF])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_the_largest_and_the_smallest_codes_do_not_saturate(name: str, fill: int, pool: ThreadPool):
    """All codes alike beside activations of 127 or -127: the largest sums of byte products there are."""
    kind = TYPES[name]
    blocks = np.full((16, 768 // kind.block_elements, kind.block_bytes), fill, np.uint8)
    for offset in HALVES.get(name, (0,)):
        blocks[:, :, offset : offset + 2] = np.float16([0.5]).view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = 127
    raw = blocks.reshape(16, -1)
    packed = PackedWeight.pack(pool, to_linear(kind, raw, NATIVE[name].format))
    x = np.full((2, 768), 127, np.float32) * np.float32([[1], [-1]])
    out = np.empty((2, 16), np.float32)
    linear(pool, x, packed, out)
    # Integers and halves of few bits: a few dozen steps lose less than a byte product that saturates.
    np.testing.assert_allclose(out, x @ values_of(name, raw).astype(np.float64).T, rtol=1e-5)
