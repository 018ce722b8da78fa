"""The order in which the products of 4-bit codes take columns."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.code_product import reorder

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reorder(device, dtype):
    x = torch.arange(3 * 1184, device=device).remainder(251).to(dtype).view(3, 1184)[:, :1120]
    out = torch.full((3, 1120), torch.nan, device=device, dtype=torch.bfloat16)
    reorder(x, out)
    for q, e, s, h in torch.cartesian_prod(torch.arange(4), *[torch.arange(2)] * 3).tolist():
        found = out[:, 16 * s + 8 * h + 2 * q + e :: 32]
        assert torch.equal(found, x[:, 8 * q + 4 * e + 2 * s + h :: 32].bfloat16())
