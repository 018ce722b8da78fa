"""The router kernel against the native one: the same experts, ties and NaN included."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.route import route
from proa.native import ops
from proa.native.runtime import CpuRuntime

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

EPS32 = 2.0**-24
TOKENS = 100 if torch.cuda.is_available() else 4


def check(device: torch.device, logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, **options: object) -> None:
    """Same ids; weights within the roundings of the exponentials."""
    tokens = logits.shape[0]
    ids, weights = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    with CpuRuntime(1) as runtime:
        ops.route(runtime.pool, logits, ids, weights, bias=bias, **options)
    got_ids = torch.full((tokens, top_k), -9, dtype=torch.int32, device=device)
    got_weights = torch.full((tokens, top_k), float("nan"), device=device)
    placed = None if bias is None else bias.to(device)
    counts = torch.full((logits.shape[1],), 3, device=device)
    route(logits.to(device), got_ids, got_weights, bias=placed, counts=counts, **options)
    assert torch.equal(counts.cpu() - 3, torch.bincount(ids.flatten(), minlength=logits.shape[1]))
    assert torch.equal(got_ids.cpu(), ids)
    torch.testing.assert_close(got_weights.cpu(), weights, rtol=64 * EPS32, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "num_experts,top_k,options",
    [
        (384, 8, {"score": "sigmoid", "eps": 1e-20, "scale": 2.827}),
        (256, 8, {"score": "sigmoid", "num_groups": 8, "top_groups": 4, "eps": 1e-20, "scale": 2.5}),
        (60, 6, {"score": "sigmoid", "num_groups": 12, "top_groups": 3, "renormalize": False}),
        (128, 8, {"score": "softmax"}),
        (8, 2, {"score": "softmax", "renormalize": False}),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_same_as_native(device, num_experts, top_k, options, biased):
    # A coarse grid: equal logits are frequent, and different ones far enough apart for any exponential.
    logits = torch.randint(-300, 300, (TOKENS, num_experts)) / 64.0
    bias = torch.randint(-8, 8, (num_experts,)) / 4.0 if biased else None
    check(device, logits, top_k, bias, **options)


@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "top_groups": 2}])
def test_any_logits_give_distinct_experts(device, options):
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e38])
    logits = special[torch.randint(0, 6, (TOKENS, 16))]
    check(device, logits, 8, None, score="sigmoid", **options)
    check(device, torch.full((1, 16), float("nan")), 8, None, score="sigmoid", **options)
    check(device, torch.zeros(1, 16), 8, None, score="softmax", **options)
