"""PackedWeight, linear and heads_linear against float64, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.weight_cases import FORMATS, WeightCase, column_step, product

from proa.native import _C
from proa.weights.linear import RawLinear

SETTINGS = settings(max_examples=25, deadline=None)


def pack(pool: _C.ThreadPool, case: WeightCase) -> _C.PackedWeight:
    return _C.PackedWeight.pack(pool, case)


def linear(pool: _C.ThreadPool, x: np.ndarray, weight: _C.PackedWeight, **options: Any) -> np.ndarray:
    out = np.full((x.shape[0], weight.out_features), 7, np.float32)
    _C.linear(pool, x, weight, out, **options)
    return out


@st.composite
def shapes(draw: st.DrawFn, fmt: str) -> tuple[int, int, int, int]:
    """(out, in, tokens, seed)."""
    step = column_step(fmt)
    columns = step * draw(st.integers(1, 300 // step))
    return draw(st.integers(1, 70)), columns, draw(st.integers(1, 40)), draw(st.integers(0, 2**32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_is_the_checkpoint(pool: _C.ThreadPool, fmt: str) -> None:
    @SETTINGS
    @given(shapes(fmt))
    def check(shape: tuple[int, int, int, int]) -> None:
        rows, columns, _, seed = shape
        case = WeightCase.make(fmt, rows, columns, np.random.default_rng(seed))
        weight = pack(pool, case)
        # The product of code and scale is exact in float64 and rounded once to float32.
        np.testing.assert_array_equal(weight.dequantize(), case.values.astype(np.float32))
        assert (weight.format, weight.out_features, weight.in_features) == (fmt, rows, columns)

    check()


def test_int4_agrees_with_compressed_tensors(pool: _C.ThreadPool) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.integers(-8, 8, (48, 96)).astype(np.int8))
    packed = pack_to_int32(q, 4)
    assert torch.equal(unpack_from_int32(packed, 4, torch.Size(q.shape)), q)
    scales = (torch.rand(48, 3) / 8).bfloat16()
    weight = _C.PackedWeight.pack(pool, RawLinear("int4_g32", 48, 96, packed.numpy().view(np.uint8), scales))
    expected = q.float() * scales.float().repeat_interleave(32, dim=1)
    np.testing.assert_array_equal(weight.dequantize(), expected.numpy())


def test_every_fp8_code_agrees_with_torch(pool: _C.ThreadPool) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scale = np.ones((1, 1), np.float32)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    weight = _C.PackedWeight.pack(pool, RawLinear("fp8_block128", 16, 16, codes, scale))
    np.testing.assert_array_equal(weight.dequantize(), expected)
    # Through the kernels: column k alone.
    finite = np.where(np.isnan(expected), np.float32(0), expected)
    codes = np.where(np.isnan(expected), np.uint8(0), codes)
    weight = _C.PackedWeight.pack(pool, RawLinear("fp8_block128", 16, 16, codes, scale))
    np.testing.assert_array_equal(linear(pool, np.eye(16, dtype=np.float32), weight), finite.T)
    np.testing.assert_array_equal(linear(pool, np.eye(16, dtype=np.float32)[:1], weight), finite.T[:1])


@pytest.mark.parametrize("rows,columns", [(129, 300), (576, 160), (160, 129), (1, 1)])
def test_fp8_edge_blocks_keep_the_fixed_grid(pool: _C.ThreadPool, rows: int, columns: int) -> None:
    case = WeightCase.make("fp8_block128", rows, columns, np.random.default_rng(1))
    np.testing.assert_array_equal(pack(pool, case).dequantize(), case.values.astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_is_within_its_error_bound(pool: _C.ThreadPool, single: _C.ThreadPool, fmt: str) -> None:
    @SETTINGS
    @given(shapes(fmt))
    def check(shape: tuple[int, int, int, int]) -> None:
        rows, columns, tokens, seed = shape
        rng = np.random.default_rng(seed)
        case = WeightCase.make(fmt, rows, columns, rng)
        x = rng.standard_normal((tokens, columns), np.float32)
        weight = pack(pool, case)
        out = linear(pool, x, weight)
        exact, bound = product(fmt, case.values, x.astype(np.float64))
        assert (np.abs(out - exact) <= bound).all()
        # Alone, backwards and on one thread: the same bits.
        np.testing.assert_array_equal(np.concatenate([linear(pool, x[i : i + 1], weight) for i in range(tokens)]), out)
        np.testing.assert_array_equal(linear(single, x[::-1], weight), out[::-1])

    check()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 13, 300])
def test_large_problems_take_every_path_with_the_same_bits(
    pool: _C.ThreadPool, crowd: _C.ThreadPool, fmt: str, tokens: int
) -> None:
    rng = np.random.default_rng(2)
    weight = pack(pool, WeightCase.make(fmt, 200, 416, rng))
    x = rng.standard_normal((tokens, 416), np.float32)
    out = linear(crowd, x, weight)
    np.testing.assert_array_equal(linear(pool, x, weight), out)
    np.testing.assert_array_equal(linear(pool, x[-1:], weight), out[-1:])


@pytest.mark.parametrize("fmt", FORMATS)
def test_bias_accumulate_and_strides(pool: _C.ThreadPool, fmt: str) -> None:
    rng = np.random.default_rng(3)
    weight = pack(pool, WeightCase.make(fmt, 37, 64, rng))
    wide = rng.standard_normal((5, 100), np.float32)
    bias = rng.standard_normal(37, np.float32)
    plain = linear(pool, wide[:, :64].copy(), weight)
    np.testing.assert_array_equal(linear(pool, wide[:, :64], weight), plain)
    np.testing.assert_array_equal(linear(pool, wide[:, :64], weight, bias=bias), plain + bias)
    target = np.full((5, 50), 7, np.float32)
    _C.linear(pool, wide[:, :64], weight, target[:, 3:40], accumulate=True)
    np.testing.assert_array_equal(target[:, 3:40], np.float32(7) + plain)
    assert (target[:, :3] == 7).all() and (target[:, 40:] == 7).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_heads_linear_is_one_linear_per_head(pool: _C.ThreadPool, fmt: str, tokens: int) -> None:
    rng = np.random.default_rng(4)
    weights = [pack(pool, WeightCase.make(fmt, 33, 64, rng)) for _ in range(6)]
    x = rng.standard_normal((6, tokens, 64), np.float32).transpose(1, 0, 2)
    out = np.full((tokens, 6, 40), 7, np.float32)
    _C.heads_linear(pool, x, weights, out[:, :, :33])
    for head, weight in enumerate(weights):
        np.testing.assert_array_equal(out[:, head, :33], linear(pool, x[:, head], weight))
    assert (out[:, :, 33:] == 7).all()


def test_kernel_report_names_the_choice_and_every_reason() -> None:
    for fmt in FORMATS:
        report = _C.kernel_report(fmt, 64, 64)
        wide = ["avx512bw"] if fmt not in ("f32", "bf16", "f16") else []
        narrow = ["avxvnni"] if fmt == "int4_g32" else []
        amx = {"f32": [], "f16": [], "int4_g32": ["amx"]}.get(fmt, ["amx", "amx"])  # one and two bf16 terms
        floats = ["avx512", "avx2", "ref"] if fmt == "int4_g32" else []  # those that read float activations
        cells = [*amx, "avx512", *wide, *narrow, "avx2", "ref", *floats]
        assert [row["name"].split(".")[0] for row in report] == cells
        assert sum(row["chosen"] for row in report) == 1
        assert all(row["reason"] for row in report)
    odd = _C.kernel_report("int4_g32", 64, 40)
    assert not any(row["chosen"] for row in odd)
    assert all("32" in row["reason"] or row["reason"].startswith("needs ") for row in odd)
    assert "32" in odd[-1]["reason"]


PACK_REFUSALS = [
    ("q8", np.ones((4, 32), np.float32), None, 4, 32, ValueError),
    ("f32", np.ones((4, 32), np.float64), None, 4, 32, TypeError),
    ("f32", np.ones((4, 31), np.float32), None, 4, 32, ValueError),
    ("f32", np.ones((32, 4), np.float32).T, None, 4, 32, ValueError),
    ("f32", np.ones((4, 32), np.float32), np.ones((4, 1), np.float32), 4, 32, ValueError),
    ("f32", np.ones((0, 32), np.float32), None, 0, 32, ValueError),
    ("f32", np.ones((4, 32), np.float32), None, -4, 32, ValueError),
    ("f32", [[1.0] * 32] * 4, None, 4, 32, TypeError),
    ("bf16", np.ones((4, 32), np.float32), None, 4, 32, TypeError),
    ("int4_g32", np.ones((4, 16), np.uint8), None, 4, 32, ValueError),
    ("int4_g32", np.ones((4, 16), np.uint8), np.ones((4, 1), np.float32), 4, 32, TypeError),
    ("int4_g32", np.ones((4, 16), np.uint8), np.ones((4, 2), np.uint16), 4, 32, ValueError),
    ("int4_g32", np.ones((4, 20), np.uint8), np.ones((4, 1), np.uint16), 4, 40, ValueError),
    ("int4_g32", np.ones((4, 4), np.int32), np.ones((4, 1), np.uint16), 4, 32, TypeError),
    ("fp8_block128", np.ones((129, 32), np.uint8), np.ones((1, 1), np.float32), 129, 32, ValueError),
    ("fp8_block128", np.ones((4, 32), np.int8), np.ones((1, 1), np.float32), 4, 32, TypeError),
]


@pytest.mark.parametrize("fmt,data,scales,rows,columns,error", PACK_REFUSALS)
def test_pack_refuses(
    pool: _C.ThreadPool, fmt: str, data: Any, scales: Any, rows: int, columns: int, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"\[PackedWeight.pack\] expected .*, got "):
        _C.PackedWeight.pack(pool, RawLinear(fmt, rows, columns, data, scales))


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


LINEAR_REFUSALS = [
    ({"x": np.ones((2, 33), np.float32)}, ValueError),
    ({"x": np.ones((2, 32), np.float64)}, TypeError),
    ({"x": np.ones(32, np.float32)}, ValueError),
    ({"x": np.ones((2, 64), np.float32)[:, ::2]}, ValueError),
    ({"x": np.ones((3, 32), np.float32)}, ValueError),
    ({"out": np.ones((2, 5), np.float32)}, ValueError),
    ({"out": np.ones((2, 4), np.float64)}, TypeError),
    ({"out": read_only(np.ones((2, 4), np.float32))}, ValueError),
    ({"out": np.broadcast_to(np.ones(4, np.float32), (2, 4))}, ValueError),
    ({"bias": np.ones(5, np.float32)}, ValueError),
    ({"bias": np.ones(4, np.float64)}, TypeError),
]


@pytest.mark.parametrize("change,error", LINEAR_REFUSALS)
def test_linear_refuses(pool: _C.ThreadPool, change: dict[str, Any], error: type[Exception]) -> None:
    weight = _C.PackedWeight.pack(pool, RawLinear("f32", 4, 32, np.ones((4, 32), np.float32), None))
    good: dict[str, Any] = {"x": np.ones((2, 32), np.float32), "out": np.ones((2, 4), np.float32), "bias": None}
    _C.linear(pool, weight=weight, **good)
    with pytest.raises(error, match=r"\[linear\] expected .*, got "):
        _C.linear(pool, weight=weight, **(good | change))


def test_heads_linear_refuses(pool: _C.ThreadPool) -> None:
    weight = _C.PackedWeight.pack(pool, RawLinear("f32", 4, 32, np.ones((4, 32), np.float32), None))
    other = _C.PackedWeight.pack(pool, RawLinear("f32", 5, 32, np.ones((5, 32), np.float32), None))
    x, out = np.ones((3, 2, 32), np.float32), np.ones((3, 2, 4), np.float32)
    refusals = (
        ([weight] * 3, ValueError),
        ([weight, other], ValueError),
        ([], ValueError),
        ([weight, 1], TypeError),
    )
    for weights, error in refusals:
        with pytest.raises(error, match=r"\[heads_linear\] expected .*, got "):
            _C.heads_linear(pool, x, weights, out)
