"""How fast the GPU of this machine is, measured in a second: `python -m proa.device.rates` prints it as JSON.

A process of its own, since CUDA's libraries keep memory that a plan would not find free.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch

__all__ = ["GpuRates", "measure_gpu", "measured_gpu"]

_BYTES = 256 << 20
_SIDE = 8192  # of square matrices: three of 128 MiB
_ROUNDS = 5
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GpuRates:
    """memory: read and written, pcie: copied from pinned memory, 10^9 bytes per second; tflops: bf16 products."""

    memory: float
    pcie: float
    tflops: float


def measured_gpu(index: int = 0) -> GpuRates | None:
    """Of GPU `index`; None where it could not be measured."""
    command = [sys.executable, "-P", "-m", "proa.device.rates", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        return GpuRates(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def measure_gpu(device: torch.device) -> GpuRates:
    """In this process; torch.OutOfMemoryError where 1 GiB is not free."""
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=True)
    first, second = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    left, right, out = (torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device) for _ in range(3))

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(_ROUNDS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return float(median(times[1:]))

    return GpuRates(
        memory=2 * _BYTES / seconds(lambda: second.copy_(first)) / 1e9,
        pcie=_BYTES / seconds(lambda: first.copy_(host, non_blocking=True)) / 1e9,
        tflops=2 * _SIDE**3 / seconds(lambda: torch.mm(left, right, out=out)) / 1e12,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_gpu(torch.device("cuda", int(sys.argv[1]))))))
