"""Kernels that work on rows, against float64."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.activation import gated_product
from proa.kernels.norm import add_rms_norm, rms_norm
from proa.kernels.rope import rope
from proa.kernels.rows import embedding_rows, kv_store

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

EPS32 = 2.0**-24
# The interpreter cuts bits off where a GPU rounds to nearest.
EPS16 = 2.0**-8 if torch.cuda.is_available() else 2.0**-7


def strided(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows with a gap behind each."""
    return torch.randn(*shape[:-1], shape[-1] + 3, device=device).to(dtype)[..., : shape[-1]]


def close(actual: torch.Tensor, expected: torch.Tensor, size: int = 1) -> None:
    """Within the rounding of the result and of `size` float32 additions."""
    result = EPS16 if actual.dtype == torch.bfloat16 else 4 * EPS32
    torch.testing.assert_close(actual.double(), expected, rtol=result + (size + 8) * EPS32, atol=1e-30)


@pytest.mark.parametrize("size", [100, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(device, size, dtype):
    x, weight = strided(device, 2, 2, size), torch.randn(size, device=device)
    out = torch.full((2, 2, size), float("nan"), device=device, dtype=dtype)
    rms_norm(x, weight, 1e-5, out)
    wide = x.double()
    close(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), size)


def test_rms_norm_in_place(device):
    x, weight = strided(device, 4, 100), torch.randn(100, device=device)
    out = torch.empty(4, 100, device=device)
    rms_norm(x, weight, 1e-5, out)
    rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("delta_dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(device, delta_dtype):
    residual, delta = strided(device, 4, 200), strided(device, 4, 200, dtype=delta_dtype)
    weight, out = torch.randn(200, device=device), torch.full((4, 200), float("nan"), device=device)
    wide = (residual + delta.float()).double()
    add_rms_norm(residual, delta, weight, 1e-6, out)
    assert torch.equal(residual.double(), wide)
    close(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(), 200)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads,dim,half,offset", [(1, 576, 32, 512), (12, 64, 24, 8)])
def test_rope(device, interleaved, heads, dim, half, offset):
    x = strided(device, 6, heads, dim)
    angles = torch.rand(40, half, device=device) * 6
    positions = torch.tensor([3, 0, 39, 7, 7, 21], dtype=torch.int32, device=device)
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    expected = x.double().clone()
    part = expected[..., offset : offset + 2 * half]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    c, s = (table.double()[positions.long()][:, None] for table in (cos, sin))
    first, second = a * c - b * s, b * c + a * s
    a.copy_(first)
    b.copy_(second)
    rope(x, cos, sin, positions, offset=offset, interleaved=interleaved)
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=4 * EPS32 * 1.5 * 8)


@pytest.mark.parametrize(
    "gating,limit,alpha", [("silu", float("inf"), 1.0), ("silu", 0.7, 1.0), ("swigluoai", 1.5, 1.702)]
)
def test_gated_product(device, gating, limit, alpha):
    gate_up = strided(device, 3, 2 * 1100)
    out = torch.full((3, 1100), float("nan"), device=device)
    gate, up = gate_up.double().split(1100, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = gate * torch.sigmoid(alpha * gate) * (up if gating == "silu" else up + 1)
    gated_product(gate_up, out, gating=gating, limit=limit, alpha=alpha)
    torch.testing.assert_close(out.double(), expected, rtol=16 * EPS32, atol=4 * EPS32)


def test_gated_product_of_large_values_is_not_nan(device):
    gate_up = torch.tensor([[-1000.0, 1000.0, -200.0, 2.0, 3.0, 4.0]], device=device)
    out = torch.empty(1, 3, device=device)
    gated_product(gate_up, out)
    assert out.tolist() == [[0.0, 3000.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_rows_and_kv_store(device, dtype):
    table = strided(device, 50, 1300, dtype=dtype)
    ids = torch.tensor([49, 0, 7, 7], dtype=torch.int32, device=device)
    out = torch.full((4, 1300), float("nan"), device=device)
    embedding_rows(table, ids, out)
    assert torch.equal(out, table[ids.long()].float())

    cache = torch.full((9, 1300), 2.0, device=device, dtype=dtype)
    slots = torch.tensor([8, -1, 0, 3], dtype=torch.int32, device=device)
    src = strided(device, 4, 1300).bfloat16().float()
    expected = cache.clone()
    expected[[8, 0, 3]] = src[[0, 2, 3]].to(dtype)
    kv_store(src, cache, slots)
    assert torch.equal(cache, expected)
