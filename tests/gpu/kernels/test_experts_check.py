"""The self-test of routed experts on a GPU."""

from __future__ import annotations

import pytest
import torch

from proa.core.errors import KernelFaultError
from proa.kernels.experts import ExpertFormat
from proa.moe import grouped
from proa.native.runtime import CpuRuntime

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

GPU = torch.cuda.is_available()


@pytest.mark.parametrize("fmt", ["int4_g32", "mxfp4", "fp8_block128", "bf16"] if GPU else ["int4_g32"])
@pytest.mark.parametrize("gating", ["silu", "swigluoai"] if GPU else ["swigluoai"])
def test_right_kernels_pass(device, fmt, gating, monkeypatch):
    if not GPU:
        monkeypatch.setattr(grouped, "TOKENS", (2,))
    with CpuRuntime(1) as runtime:
        grouped.check_grouped(runtime.pool, ExpertFormat(7168, 2048, fmt, fmt, gating, 7.0, 1.7), device)


def test_a_wrong_sum_is_refused(device, monkeypatch):
    def of_the_first_slot(x, ids, weights, arena, table, fmt, out, scratch):
        out.zero_()

    monkeypatch.setattr(grouped, "grouped_experts", of_the_first_slot)
    with CpuRuntime(1) as runtime, pytest.raises(KernelFaultError, match="experts of int4_g32 and bf16"):
        grouped.check_grouped(runtime.pool, ExpertFormat(256, 256, "int4_g32", "bf16"), device)
