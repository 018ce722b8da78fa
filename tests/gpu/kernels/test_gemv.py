"""Linears of a handful of tokens against float64."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.gemv import MAX_TOKENS, gemv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter


@pytest.mark.parametrize("tokens", range(1, MAX_TOKENS + 1) if torch.cuda.is_available() else (1, 2, 7))
@pytest.mark.parametrize(("rows", "columns"), [(5, 40), (70, 333)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_float32(tokens, rows, columns, dtype, device):
    """Rows with strides, a bias, and sums of n products, each step off by at most 2^-24 of what is summed so far."""
    x = torch.randn(tokens, columns + 7, device=device)[:, 3 : columns + 3]
    weight = torch.randn(rows, columns, device=device).to(dtype)
    bias = torch.randn(rows, device=device)
    out = torch.full((tokens, rows + 9), torch.nan, device=device)[:, :rows]
    gemv(x, weight, out, bias=bias)
    exact = x.double() @ weight.double().T + bias.double()
    bound = (columns + 2) * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + bias.abs().double())
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_adds_to_what_is_there(tokens, device):
    x, weight = torch.randn(tokens, 64, device=device), torch.randn(33, 64, device=device)
    before = torch.randn(tokens, 33, device=device)
    out, alone = before.clone(), torch.empty_like(before)
    gemv(x, weight, out, accumulate=True)
    gemv(x, weight, alone)
    assert torch.equal(out, alone + before)


def test_no_tokens(device):
    gemv(torch.empty(0, 8, device=device), torch.ones(4, 8, device=device), torch.empty(0, 4, device=device))
