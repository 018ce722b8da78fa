"""What the machine can do at most, measured beside the experts: read bandwidth and the rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from proa.native import _C
from proa.native.runtime import probe_mebibytes

__all__ = ["MatrixRates", "ReadRate"]

PASSES = 3
GEMM = (1024, 4096, 4096)  # [M, N, K]: large enough to be compute-bound, a tenth of a second on two cores


class ReadRate:
    """Reads memory several times as large as the L3 cache with threads on `cpus`, whenever asked."""

    def __init__(self, cpus: Sequence[int], l3_bytes: int) -> None:
        mebibytes = probe_mebibytes(l3_bytes)
        self._gigabytes = (mebibytes << 20) / 1e9
        self._probe = _C.ReadProbe(list(cpus), mebibytes)

    def sample(self) -> list[tuple[float, float]]:
        """10^9 bytes per second, and per second of CPU time, of a few passes but the first, which wakes the threads."""
        self._probe.measure()
        return [self._pass() for _ in range(PASSES)]

    def _pass(self) -> tuple[float, float]:
        start = time.process_time()
        rate = self._probe.measure()
        return rate, self._gigabytes / (time.process_time() - start)


class MatrixRates:
    """Rates of torch's GEMMs in int8, bf16 (oneDNN) and f32 on `threads` threads.

    Without torch there is nothing to compare with: `note` says so and `sample` returns no rates.
    """

    def __init__(self, threads: int) -> None:
        self.note = ""
        self._gemms: dict[str, Callable[[], Any]] = {}
        try:
            import torch  # slow to import, and not everywhere
        except ImportError:
            self.note = "torch is missing: the matrix rate was not measured"
            return
        torch.set_num_threads(threads)
        rows, columns, inner = GEMM
        left_f32, right_f32 = torch.randn(rows, inner), torch.randn(columns, inner).t()
        left, right = left_f32.bfloat16(), right_f32.bfloat16()
        left_int8 = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
        right_int8 = torch.randint(-127, 128, (columns, inner), dtype=torch.int8).t()
        self._gemms = {
            "torch.f32": lambda: torch.mm(left_f32, right_f32),
            "torch.bf16": lambda: torch.mm(left, right),
            "torch.int8": lambda: torch._int_mm(left_int8, right_int8),  # noqa: SLF001  # torch has no public one
        }
        for gemm in self._gemms.values():
            gemm()

    def sample(self) -> dict[str, float]:
        """10^12 operations per second of one product of each kind."""
        rows, columns, inner = GEMM
        rates = {}
        for name, gemm in self._gemms.items():
            start = time.perf_counter()
            gemm()
            rates[name] = 2 * rows * columns * inner / (time.perf_counter() - start) / 1e12
        return rates
