"""Tokens handed to CPU experts: all of them, ids of the GPU's experts left out."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.hand_over import hand_over
from proa.moe.deferral import split_slots
from proa.moe.router import TopK


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


@pytest.mark.parametrize(("top_k", "num_late"), [(8, 1), (8, 7), (6, 2), (3, 1)])
def test_late_slots_are_those_of_the_rule(device, top_k, num_late):
    """Equal weights among them, experts on the GPU and slots without one."""
    tokens, hidden, experts = 5, 96, 12
    x = torch.randn(tokens, hidden, device=device)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().to(device)
    weights = torch.randint(0, 4, (tokens, top_k), device=device) / 8
    table = torch.full((experts, 3), -1, dtype=torch.int64, device=device)
    table[2], table[5] = 0, 4096
    given, late = (torch.full((tokens + 1, top_k), 7, dtype=torch.int32, device=device) for _ in range(2))
    host = (
        torch.zeros(tokens, hidden, device=device),
        given,
        torch.zeros(tokens, top_k, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    hand_over(x, ids, weights, table, host, late, num_late)
    now, expected = split_slots(TopK(ids, weights), num_late, table)
    assert torch.equal(late[:tokens], expected)
    assert torch.equal(given[:tokens], now.masked_fill((now == 2) | (now == 5), -1))
    assert (given[tokens:] == 7).all() and (late[tokens:] == 7).all()
