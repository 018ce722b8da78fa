"""The self-test of kernels passes on this machine, and finds kernels that compute something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from proa.core.errors import KernelFaultError
from proa.layers import kernel_check
from proa.layers.kernel_check import KernelUse, check_kernels, run_checks
from proa.native import _C


@pytest.fixture(scope="module")
def pool() -> Iterator[_C.ThreadPool]:
    threads = _C.ThreadPool([entry["cpu"] for entry in _C.cpu_info()["cpus"]][:3])
    yield threads
    threads.close()


@pytest.mark.parametrize("activations", ["trunk", "int8", "bf16"])
@pytest.mark.parametrize("weight_format", _C.weight_formats())
def test_every_kernel_of_this_machine_passes(pool: _C.ThreadPool, weight_format: str, activations: Any) -> None:
    use = KernelUse(weight_format, 2048, 7168, activations)
    assert [(check.kernel, check.fault) for check in run_checks(pool, [use])] == [(use.kernel, "")] * bool(use.kernel)


def test_a_kernel_is_checked_once(pool: _C.ThreadPool) -> None:
    uses = [KernelUse("bf16", rows, 64) for rows in (32, 64, 96)] + [KernelUse("f32", 32, 33)]
    assert [check.format for check in check_kernels(pool, uses)] == ["bf16", "f32"]


def broken_linear(change: Callable[[np.ndarray], None]) -> Callable[..., None]:
    linear = _C.linear

    def broken(*arguments: Any) -> None:
        linear(*arguments)
        change(arguments[3])

    return broken


def swap_columns(out: np.ndarray) -> None:
    out[:, [3, 4]] = out[:, [4, 3]]


def lose_a_row(out: np.ndarray) -> None:
    out[:, -1] = 0


def spoil_many_tokens(out: np.ndarray) -> None:
    if len(out) > 16:
        out[-1, 7] *= np.float32(1.01)


def not_a_number(out: np.ndarray) -> None:
    out[0, 0] = np.nan


@pytest.mark.parametrize("change", [swap_columns, lose_a_row, spoil_many_tokens, not_a_number])
def test_a_wrong_product_is_found_and_named(
    pool: _C.ThreadPool, monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], None]
) -> None:
    monkeypatch.setattr(_C, "linear", broken_linear(change))
    use = KernelUse("int4_g32", 64, 512)
    lower = {"amx": "avx512", "avx512": "avx2"}.get(_C.cpu_info()["isa_in_use"], "ref")
    with pytest.raises(KernelFaultError, match=rf"\[{use.kernel}\] .* PROA_FORCE_ISA={lower}"):
        check_kernels(pool, [use])


@pytest.mark.parametrize("factor", [1.03, np.nan])
def test_a_wrong_expert_layer_is_found(pool: _C.ThreadPool, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    class Broken(_C.ExpertLayer):
        def forward(self, x: Any, ids: Any, weights: Any, out: Any, accumulate: bool = False) -> None:
            super().forward(x, ids, weights, out, accumulate)
            out *= np.float32(factor)

    monkeypatch.setattr(kernel_check, "ExpertLayer", Broken)
    with pytest.raises(KernelFaultError, match="expert layer"):
        check_kernels(pool, [KernelUse("f32", 64, 512)])
