"""Linear layers against float64 products of the values that checkpoints stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.weight_cases import WeightCase

from proa.kernels.gluon_import import has_gluon
from proa.kernels.heads import heads_linear
from proa.kernels.linear import linear
from proa.kernels.skinny_gemm import takes_rows
from proa.kernels.weight_tiles import kind_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

GPU = torch.cuda.is_available()
FORMATS = ["f32", "bf16", "fp8_block128", "int4_g32", "int4_g32_f16", "mxfp4"]
EPS32 = 2.0**-24


def place(case: WeightCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data and scales as the kernels take them."""
    data = torch.from_numpy(case.data)
    data = data.view(torch.bfloat16) if case.format == "bf16" else data
    scales = None if case.scales is None else torch.from_numpy(np.ascontiguousarray(case.scales)).to(device)
    return data.to(device), scales


def bound(x: torch.Tensor, case: WeightCase, *, terms: int, rounded: bool) -> torch.Tensor:
    """Of the error of each output: float32 sums, activations as 3 bf16 terms (exact), 2 or 1, weights as bf16."""
    values = torch.from_numpy(case.values).abs()
    total = x.double().abs().cpu() @ values.T
    error = (case.in_features + 2) * EPS32 + {1: 2.0**-9, 2: 2.0**-17, 3: 0.0}[terms]
    if rounded and case.format not in ("bf16", "mxfp4"):
        error += 2.0**-9 + 2.0**-17
    return total * error


def check(device: torch.device, fmt: str, tokens: int, shape: tuple[int, int], **options: bool) -> None:
    case = WeightCase.make(fmt, *shape, np.random.default_rng(shape[0] + tokens))
    data, scales = place(case, device)
    x = torch.randn(tokens, shape[1] + 5, device=device)[:, : shape[1]]
    bias = torch.randn(shape[0], device=device)
    out = torch.full((tokens, shape[0] + 3), float("nan"), device=device)[:, : shape[0]]
    linear(x, data, scales, out, weight_format=fmt, bias=bias, **options)
    exact = options.get("exact", False) or not GPU or fmt == "f32" or tokens <= 4
    few = takes_rows(x, data, scales, kind_of(fmt), exact=False)
    expected = x.double().cpu() @ torch.from_numpy(case.values).T + bias.double().cpu()
    terms = 3 if exact else 2 if tokens <= 16 else 1
    tolerance = bound(x, case, terms=terms, rounded=not exact and not few) + 4 * EPS32 * expected.abs()
    assert ((out.double().cpu() - expected).abs() <= tolerance).all()
    before = out.clone()
    linear(x, data, scales, out, weight_format=fmt, accumulate=True, **options)
    product = expected - bias.double().cpu()
    assert ((out.double().cpu() - before.double().cpu() - product).abs() <= 2 * tolerance + EPS32 * 8).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 100] if GPU else [1, 3, 17])
def test_linear(device, fmt, tokens):
    check(device, fmt, tokens, (200, 1120) if GPU else (40, 160 if tokens > 1 else 416))


@pytest.mark.skipif(not GPU, reason="a kernel of Hopper")
@pytest.mark.parametrize("fmt", FORMATS[2:])
@pytest.mark.parametrize("tokens", [2, 3, 7, 16])
@pytest.mark.parametrize("rows", [200, 4112])
@pytest.mark.parametrize("columns", [512, 2560])
def test_few_tokens(device, fmt, tokens, rows, columns):
    """Steps and tiles that do not fill."""
    check(device, fmt, tokens, (rows, columns))


def test_skinny_gemm_leaves_others(device):
    x, data = torch.zeros(4, 512, device=device), torch.zeros(8, 256, dtype=torch.uint8, device=device)
    scales = torch.zeros(8, 16, dtype=torch.bfloat16, device=device)
    taken = has_gluon(device)
    assert takes_rows(x, data, scales, kind_of("int4_g32"), exact=True) == taken
    assert takes_rows(x.repeat(2, 1), data, scales, kind_of("int4_g32"), exact=False) == taken
    assert not takes_rows(x.repeat(2, 1), data, scales, kind_of("int4_g32"), exact=True)
    assert not takes_rows(x[:1], data, scales, kind_of("int4_g32"), exact=True)
    assert not takes_rows(x.repeat(5, 1), data, scales, kind_of("int4_g32"), exact=False)
    assert not takes_rows(x[:, :256], data[:, :128], scales[:, :8], kind_of("int4_g32"), exact=True)
    assert not takes_rows(x, data.flatten()[8:], scales, kind_of("int4_g32"), exact=True)
    assert not takes_rows(x, torch.zeros(8, 512), None, kind_of("f32"), exact=True)


@pytest.mark.skipif(not GPU, reason="the interpreter's products are exact anyway")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_exact_linear(device, fmt, tokens):
    check(device, fmt, tokens, (200, 1120), exact=True)


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_odd_input_sizes(device, fmt):
    check(device, fmt, 2, (17, 37))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_linear(device, dtype):
    x, weight = torch.randn(5, 3, 44, device=device)[..., :40], torch.randn(3, 72, 40, device=device).to(dtype)
    out = torch.full((5, 3, 72), float("nan"), device=device)
    heads_linear(x, weight, out)
    terms = torch.einsum("thi,hoi->tho", x.double().abs(), weight.double().abs())
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    assert ((out.double() - expected).abs() <= terms * (2.0**-17 + 42 * EPS32)).all()
