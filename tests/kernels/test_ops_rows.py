"""Norms, rotary embedding, KV writes and embedding."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.kernels.ops_cases import EPS32, same_bits

from proa.native import ops
from proa.native.ops import ThreadPool
from proa.native.runtime import CpuRuntime

SIZES = [1, 7, 16, 63, 64, 65, 576, 2048]


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def norm_bound(expected: torch.Tensor) -> torch.Tensor:
    """Size / 64 + 8 roundings in the sum of squares, halved by the root; 8 more in mean, root, quotient, products."""
    return expected.abs() * (expected.shape[-1] / 128 + 12) * EPS32


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(pool: ThreadPool, single: ThreadPool, rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size) * 3, torch.randn(size)
    out = torch.empty_like(x)
    ops.rms_norm(pool, x, weight, 1e-6, out)
    expected = norm64(x, weight, 1e-6)
    assert ((out.double() - expected).abs() <= norm_bound(expected)).all()
    alone = torch.empty_like(out)
    for r in range(rows):
        ops.rms_norm(single, x[r : r + 1], weight, 1e-6, alone[r : r + 1])
    assert same_bits(alone, out)


def test_rms_norm_of_heads_in_place(pool: ThreadPool) -> None:
    qkv = torch.randn(70, 5, 3, 80)
    heads, weight = qkv[:, 1:4, 0, :64], torch.randn(64)
    before = qkv.clone()
    expected = norm64(heads, weight, 1e-5)
    ops.rms_norm(pool, heads, weight, 1e-5, heads)
    assert ((heads.double() - expected).abs() <= norm_bound(expected)).all()
    qkv[:, 1:4, 0, :64] = before[:, 1:4, 0, :64]
    assert same_bits(qkv, before)  # nothing around the heads was touched


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(pool: ThreadPool, size: int) -> None:
    residual, delta, weight = torch.randn(40, size), torch.randn(40, size), torch.randn(size)
    total, out, again = residual + delta, torch.empty(40, size), torch.empty(40, size)
    ops.add_rms_norm(pool, residual, delta, weight, 1e-5, out)
    assert same_bits(residual, total)
    ops.rms_norm(pool, total, weight, 1e-5, again)
    assert same_bits(out, again)


def rotate64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    x = x.double().clone()
    part = x[..., offset : offset + 2 * half]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    a, b, c, s = a.clone(), b.clone(), cos.double()[:, None], sin.double()[:, None]
    first, second = a * c - b * s, b * c + a * s
    if interleaved:
        part[..., ::2], part[..., 1::2] = first, second
    else:
        part[..., :half], part[..., half:] = first, second
    return x


@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
    interleaved=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_rope(pool: ThreadPool, tokens: int, heads: int, half: int, before: int, after: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads + 1, before + 2 * half + after, generator=generator)[:, :heads]
    angles = torch.rand(50, half, generator=generator) * 6
    positions = torch.randint(0, 50, (tokens,), generator=generator).int()
    cos, sin = angles.cos(), angles.sin()
    expected = rotate64(x, cos[positions], sin[positions], before, interleaved)
    untouched = x.clone()
    ops.rope(pool, x, cos, sin, positions, offset=before, interleaved=interleaved)
    # Two products and a sum: three roundings of terms no larger than |a| + |b|.
    assert ((x.double() - expected).abs() <= 3 * EPS32 * 2 * untouched.abs().amax()).all()
    assert same_bits(x[..., :before], untouched[..., :before])
    assert same_bits(x[..., before + 2 * half :], untouched[..., before + 2 * half :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_kv_store(pool: ThreadPool, dtype: torch.dtype, tokens: int) -> None:
    src = torch.randn(tokens, 3, 100)[:, 1, :96]
    cache = torch.zeros(400, 128, dtype=dtype)
    slots = torch.randperm(400)[:tokens].int()
    expected = cache.clone()
    expected[slots.long(), 16:112] = src.to(dtype)
    ops.kv_store(pool, src, cache[:, 16:112], slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_embedding_rows(pool: ThreadPool, dtype: torch.dtype) -> None:
    table = torch.randn(50, 70).to(dtype)
    ids = torch.randint(0, 50, (400,)).int()
    out = torch.empty(400, 70)
    ops.embedding_rows(pool, table, ids, out)
    assert torch.equal(out, table[ids.long()].float())


def test_numpy_arrays_are_taken(pool: ThreadPool) -> None:
    table = np.arange(12, dtype=np.uint16).reshape(3, 4)
    table.flags.writeable = False
    out = np.empty((2, 4), np.float32)
    ops.embedding_rows(pool, table, np.array([2, 0], np.int32), out)
    assert (out.view(np.uint32) == table[[2, 0]].astype(np.uint32) << 16).all()


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def read_only() -> np.ndarray:
    array = np.zeros((2, 8), np.float32)
    array.flags.writeable = False
    return array


X, W, TABLES = rows(2, 8), rows(8), rows(5, 2)
REFUSED = {
    "norm weight": (ops.rms_norm, (X, rows(7), 1e-5, rows(2, 8)), ValueError, "weight with shape"),
    "norm rank": (ops.rms_norm, (W, W, 1e-5, W), ValueError, "x with shape"),
    "norm out": (ops.rms_norm, (X, W, 1e-5, rows(3, 8)), ValueError, "out with shape"),
    "norm dtype": (ops.rms_norm, (X.double(), W, 1e-5, X), TypeError, "x as float32"),
    "norm eps": (ops.rms_norm, (X, W, float("nan"), rows(2, 8)), ValueError, "eps"),
    "norm negative eps": (ops.rms_norm, (X, W, -1.0, rows(2, 8)), ValueError, "eps"),
    "norm read-only": (ops.rms_norm, (X, W, 1e-5, read_only()), ValueError, "writable"),
    "norm column": (ops.rms_norm, (rows(8, 2).T, W, 1e-5, rows(2, 8)), ValueError, "contiguous last"),
    "add delta": (ops.add_rms_norm, (X, rows(2, 7), W, 1e-5, rows(2, 8)), ValueError, "delta with shape"),
    "add overlap": (ops.add_rms_norm, (rows(1, 8).expand(2, 8), X, W, 1e-5, rows(2, 8)), ValueError, "overlap"),
    "rope position": (
        ops.rope,
        (rows(1, 1, 8), TABLES, TABLES, ints(5)),
        ValueError,
        "positions with entries in 0 .. 4",
    ),
    "rope negative": (ops.rope, (rows(1, 1, 8), TABLES, TABLES, ints(-1)), ValueError, "positions with entries"),
    "rope sin": (ops.rope, (rows(1, 1, 8), TABLES, rows(4, 2), ints(0)), ValueError, "sin with shape"),
    "rope count": (ops.rope, (rows(2, 1, 8), TABLES, TABLES, ints(0)), ValueError, "positions with shape"),
    "rope too wide": (ops.rope, (rows(1, 1, 3), TABLES, TABLES, ints(0)), ValueError, "offset"),
    "rope int64": (ops.rope, (rows(1, 1, 8), TABLES, TABLES, ints(0).long()), TypeError, "positions as int32"),
    "store slot": (ops.kv_store, (X, rows(4, 8), ints(0, 4)), ValueError, "slots with entries in 0 .. 3, got 4 at 1"),
    "store negative": (ops.kv_store, (X, rows(4, 8), ints(-1, 0)), ValueError, "slots with entries"),
    "store width": (ops.kv_store, (X, rows(4, 9), ints(0, 1)), ValueError, "cache with shape"),
    "store dtype": (ops.kv_store, (X, rows(4, 8).half(), ints(0, 1)), TypeError, "cache as float32"),
    "embed id": (ops.embedding_rows, (rows(4, 8), ints(0, 4), X), ValueError, "ids with entries in 0 .. 3"),
    "embed negative": (ops.embedding_rows, (rows(4, 8), ints(-1, 0), X), ValueError, "ids with entries"),
    "embed out": (ops.embedding_rows, (rows(4, 8), ints(0), X), ValueError, "out with shape"),
    "embed none": (ops.embedding_rows, (None, ints(0), X), TypeError, "NoneType"),
    "embed misaligned": (
        ops.embedding_rows,
        (np.zeros(33, np.uint8)[1:].view(np.float32).reshape(1, 8), ints(0), rows(1, 8)),
        ValueError,
        "aligned",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_wrong_arguments(pool: ThreadPool, name: str) -> None:
    function, args, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        function(pool, *args)


@pytest.mark.parametrize("offset", [-1, 5, 2**40])
def test_rope_refuses_offsets(pool: ThreadPool, offset: int) -> None:
    with pytest.raises(ValueError, match=r"offset in 0 .. head size - 4 = 4"):
        ops.rope(pool, rows(1, 1, 8), TABLES, TABLES, ints(0), offset=offset)


def test_refuses_other_devices(pool: ThreadPool) -> None:
    with pytest.raises(ValueError, match="on the CPU"):
        ops.rms_norm(pool, torch.empty(2, 8, device="meta"), W, 1e-5, rows(2, 8))


def test_refuses_a_closed_pool() -> None:
    runtime = CpuRuntime(1)
    runtime.close()
    runtime.close()
    with pytest.raises(ValueError, match="open pool"):
        ops.rms_norm(runtime.pool, X, W, 1e-5, rows(2, 8))
