"""Grouped products of experts in the CPU's packed bytes, against float64 products of the weights' values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.kernels.weight_cases import WeightCase

from proa.kernels.code_product import takes_codes
from proa.kernels.experts import ExpertFormat, ExpertScratch, expert_bytes, grouped_experts
from proa.kernels.weight_tiles import panel_bytes
from proa.native.ops import PackedWeight, ThreadPool
from proa.native.runtime import CpuRuntime

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

GPU = torch.cuda.is_available()
FORMATS = ["int4_g32", "int4_g32_f16", "mxfp4", "fp8_block128", "bf16", "f32"]
# Neither is a multiple of the groups of all super-blocks, of tiles or of steps.
HIDDEN, INTERMEDIATE = (992, 352) if GPU else (96, 32)
NUM_EXPERTS, TOP_K, ELSEWHERE = (24, 6, 5) if GPU else (4, 2, 3)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with CpuRuntime(1) as runtime:
        yield runtime.pool


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts with their values; the one numbered ELSEWHERE is not in the arena."""

    fmt: ExpertFormat
    arena: torch.Tensor
    table: torch.Tensor
    values: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @classmethod
    def make(
        cls,
        pool: ThreadPool,
        device: torch.device,
        gate_up: str,
        down: str,
        sizes: tuple[int, int] = (HIDDEN, INTERMEDIATE),
    ) -> Experts:
        rng = np.random.default_rng(3)
        hidden, intermediate = sizes
        fmt = ExpertFormat(hidden, intermediate, gate_up, down)
        nbytes = expert_bytes(fmt)
        parts, values, table = [np.full(64, 255, np.uint8)], [], []
        for expert in range(NUM_EXPERTS):
            cases = [
                WeightCase.make(gate_up, intermediate, hidden, rng),
                WeightCase.make(gate_up, intermediate, hidden, rng),
                WeightCase.make(down, hidden, intermediate, rng),
            ]
            packed = [PackedWeight.pack(pool, case).packed for case in cases]
            assert [len(part) for part in packed] == [nbytes[0], nbytes[0], nbytes[1]]
            offsets = np.cumsum([sum(map(len, parts)), *(len(part) for part in packed)])
            table.append([-1, -1, -1] if expert == ELSEWHERE else list(offsets[:3]))
            parts += packed
            values.append(tuple(torch.from_numpy(case.values) for case in cases))
        arena = torch.from_numpy(np.concatenate(parts)).to(device)
        return cls(fmt, arena, torch.tensor(table, device=device), values)

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 results, and the sums of the sizes of all products that go into them."""
        x = x.double().cpu()
        out, size = torch.zeros_like(x), torch.zeros_like(x)
        for expert in set(range(NUM_EXPERTS)) - {ELSEWHERE}:
            t, s = (ids == expert).nonzero(as_tuple=True)
            gate, up, down = self.values[expert]
            g, u = x[t] @ gate.T, x[t] @ up.T
            hidden = g * torch.sigmoid(g) * u
            # |d silu(g)| <= 1.1 |dg|
            reach = 1.1 * (x[t].abs() @ gate.abs().T) * (u.abs() + x[t].abs() @ up.abs().T)
            weight = weights[t, s].double()[:, None]
            out.index_add_(0, t, weight * (hidden @ down.T))
            size.index_add_(0, t, weight.abs() * ((hidden.abs() + reach) @ down.abs().T))
        return out, size


def batch(device: torch.device, tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with a gap between rows, distinct ids with some -1, weights."""
    x = torch.randn(tokens, hidden + 8, device=device)[:, :hidden]
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    ids[torch.rand(tokens, TOP_K) < 0.1] = -1
    return x, ids.to(device), torch.rand(tokens, TOP_K).to(device)


def check(experts: Experts, device: torch.device, tokens: int, *, exact: bool = False) -> None:
    hidden = experts.fmt.hidden
    x, ids, weights = batch(device, tokens, hidden)
    scratch = ExpertScratch(tokens, TOP_K, NUM_EXPERTS, experts.fmt, device, exact=exact)
    for buffer in scratch.buffers(tokens, experts.fmt):
        buffer.fill_(float("nan"))
    out = torch.full((tokens, hidden), float("nan"), device=device)
    grouped_experts(x, ids, weights, experts.arena, experts.table, experts.fmt, out, scratch)
    expected, size = experts.expected(x, ids.cpu(), weights.cpu())
    # Roundings of float32 sums; on tensor cores of weights, of many tokens' activations and of what is handed over.
    error = (hidden + experts.fmt.intermediate + 32) * 2.0**-24 if scratch.exact or tokens <= 16 else 6 * 2.0**-9
    assert ((out.double().cpu() - expected).abs() <= size * error).all()
    again = out.clone()
    grouped_experts(x, ids, weights, experts.arena, experts.table, experts.fmt, again, scratch, accumulate=True)
    assert torch.equal(again, out + out)


def test_panel_bytes_are_those_of_the_native_formats():
    from proa.native import _C

    for fmt in FORMATS:
        for columns in (32, 96, 160, 352, 2048):
            assert panel_bytes(fmt, columns) * 2 == _C.packed_bytes(fmt, 17, columns), (fmt, columns)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 1100] if GPU else [2])
def test_grouped_experts(device, pool, fmt, tokens):
    check(Experts.make(pool, device, fmt, fmt), device, tokens)


@pytest.mark.skipif(not GPU, reason="kernels of Hopper")
@pytest.mark.parametrize("formats", [("int4_g32", "int4_g32"), ("mxfp4", "mxfp4"), ("int4_g32", "mxfp4")])
@pytest.mark.parametrize("sizes", [(256, 128), (1152, 448)])
@pytest.mark.parametrize("tokens", [17, 100, 200, 1100])
def test_codes(device, pool, formats, sizes, tokens):
    """Super-blocks of groups that end early, tiles that do not fill."""
    assert takes_codes(*sizes, *formats, device) or torch.cuda.get_device_capability()[0] != 9
    check(Experts.make(pool, device, *formats, sizes), device, tokens)


def test_down_of_another_format(device, pool):
    check(Experts.make(pool, device, "int4_g32", "bf16"), device, 2)


def test_more_pairs_than_one_program_sorts(device, pool):
    check(Experts.make(pool, device, "bf16", "bf16"), device, 400 if GPU else 17)


@pytest.mark.skipif(not GPU, reason="the interpreter's products are exact anyway")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [5, 100])
def test_exact(device, pool, fmt, tokens):
    check(Experts.make(pool, device, fmt, fmt), device, tokens, exact=True)
