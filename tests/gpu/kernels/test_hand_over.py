"""Tokens handed to CPU experts: all of them, ids of the GPU's experts left out."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.hand_over import hand_over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(1, 7168, 8), (3, 96, 3), (5, 2049, 1)])
def test_writes_what_the_cpu_reads(device, dtype, tokens, hidden, top_k):
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    ids = torch.randint(-1, 6, (tokens, top_k), device=device, dtype=torch.int32)
    weights = torch.rand(tokens, top_k, device=device)
    table = torch.full((6, 3), -1, dtype=torch.int64, device=device)
    table[2], table[5] = 0, 4096
    rows = tokens + 2
    host = (
        torch.full((rows, hidden), 7.0, device=device),
        torch.full((rows, top_k), 7, dtype=torch.int32, device=device),
        torch.full((rows, top_k), 7.0, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    hand_over(x, ids, weights, table, host)
    assert torch.equal(host[0][:tokens], x.float())
    assert torch.equal(host[1][:tokens], ids.masked_fill((ids == 2) | (ids == 5), -1))
    assert torch.equal(host[2][:tokens], weights)
    assert host[3].item() == tokens
    assert all((rest[tokens:] == 7).all() for rest in host[:3])
