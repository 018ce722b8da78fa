"""Gluon, Triton's language of explicit layouts, where a Triton is installed whose Gluon the kernels were written for.

It is experimental: names move from release to release. Kernels in it have a counterpart in plain Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from proa.kernels.triton_import import INTERPRETED, has_warp_groups

__all__ = ["TensorDescriptor", "async_copy", "gl", "gluon_constant", "gluon_jit", "has_gluon", "hopper", "mma_v2"]

# 3.6 ran on an H200; kernels compile for it with 3.7.
_LEAST, _BELOW = (3, 6), (3, 8)


def _is_known() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return _LEAST <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < _BELOW


_KNOWN = _is_known()

if _KNOWN:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    gluon_jit: Any = gluon.jit
    # Python that runs while a kernel is compiled.
    gluon_constant: Any = gluon.constexpr_function
else:
    gl = hopper = async_copy = mma_v2 = TensorDescriptor = None

    def gluon_jit(function: Any) -> Any:
        """A kernel that nobody launches."""
        return function

    gluon_constant = gluon_jit


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether kernels for Hopper's warp groups run on a tensor's device."""
    return _KNOWN and not INTERPRETED and device.type == "cuda" and has_warp_groups(device)
