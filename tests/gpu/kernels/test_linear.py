"""Linear layers against float64 products of the values that checkpoints stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.weight_cases import WeightCase

from proa.kernels.heads import heads_linear
from proa.kernels.linear import linear

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


def bound(x: torch.Tensor, case: WeightCase, *, exact: bool, terms: int) -> torch.Tensor:
    """Of the error of each output: float32 sums and, on tensor cores, activations and weights in bf16."""
    values = torch.from_numpy(case.values).abs()
    total = x.double().abs().cpu() @ values.T
    error = (case.in_features + 2) * EPS32
    if not exact:
        error += 2.0**-17 if terms == 2 else 2.0**-9
        error += 2.0**-17 if case.format in ("bf16", "mxfp4") else 2.0**-9 + 2.0**-17
    return total * error


def check(device: torch.device, fmt: str, tokens: int, shape: tuple[int, int], **options: bool) -> None:
    case = WeightCase.make(fmt, *shape, np.random.default_rng(shape[0] + tokens))
    data, scales = place(case, device)
    x = torch.randn(tokens, shape[1] + 5, device=device)[:, : shape[1]]
    bias = torch.randn(shape[0], device=device)
    out = torch.full((tokens, shape[0] + 3), float("nan"), device=device)[:, : shape[0]]
    linear(x, data, scales, out, weight_format=fmt, bias=bias, **options)
    packed = fmt not in ("f32", "bf16")
    exact = options.get("exact", False) or not GPU or fmt == "f32" or (packed and tokens <= 4)
    expected = x.double().cpu() @ torch.from_numpy(case.values).T + bias.double().cpu()
    tolerance = bound(x, case, exact=exact, terms=2 if tokens <= 16 else 1) + 4 * EPS32 * expected.abs()
    assert ((out.double().cpu() - expected).abs() <= tolerance).all()
    before = out.clone()
    linear(x, data, scales, out, weight_format=fmt, accumulate=True, **options)
    product = expected - bias.double().cpu()
    assert ((out.double().cpu() - before.double().cpu() - product).abs() <= 2 * tolerance + EPS32 * 8).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 100] if GPU else [1, 3, 17])
def test_linear(device, fmt, tokens):
    check(device, fmt, tokens, (200, 1120) if GPU else (40, 160 if tokens > 1 else 416))


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
