"""Triton where it is installed. Elsewhere kernels can be imported, and launching one says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from proa.core.errors import UnsupportedError

__all__ = ["INTERPRETED", "has_warp_groups", "jit", "next_power_of_2", "shared_memory", "tl"]

try:
    import triton
    import triton.language as tl
except ImportError:
    INTERPRETED = False

    class _MissingLanguage:
        """What default arguments of kernels name."""

        constexpr = object()

    class _MissingKernel:
        """Takes a grid and arguments, and raises."""

        def __init__(self, function: Callable[..., None]) -> None:
            self._name = function.__name__

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self._launch

        def _launch(self, *_args: object, **_options: object) -> None:
            raise UnsupportedError(f"GPU kernel {self._name}", "the package triton", "none", "pip install triton")

    tl = _MissingLanguage()
    jit: Any = _MissingKernel
else:
    jit = triton.jit
    # TRITON_INTERPRET=1: kernels run on the CPU, program after program, as numpy. It has no bf16 arithmetic.
    INTERPRETED = bool(triton.knobs.runtime.interpret)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of one program on a tensor's device: 227 KiB on Hopper, 163 on A100, 99 on GeForce."""
    if device.type != "cuda":
        return 227 << 10
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


@cache
def has_warp_groups(device: torch.device) -> bool:
    """Whether the tensor cores take operands from shared memory, four warps at once: Hopper."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
