"""RMS normalisation (Zhang and Sennrich, 2019), one program a row."""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, next_power_of_2, tl

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """`out = x * rsqrt(mean(x^2) + eps) * weight` over the last dimension, in float32.

    x, out: float32 or bf16 `[R, D]` or `[T, heads, D]`, rows strided; out may be x itself. weight: float32 `[D]`.
    """
    tokens, heads, size = x.shape if x.ndim == 3 else (x.shape[0], 1, x.shape[1])
    if tokens == 0:
        return
    _rms_norm[(tokens, heads)](
        x,
        weight,
        out,
        size,
        eps,
        *_row_strides(x),
        *_row_strides(out),
        BLOCK=next_power_of_2(size),
        num_warps=_warps(size),
    )


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """`residual += delta`, then `out = rms_norm(residual)`.

    residual: float32 `[T, D]`; delta and out: float32 or bf16 `[T, D]`; rows strided. weight: float32 `[D]`.
    """
    tokens, size = residual.shape
    if tokens == 0:
        return
    strides = (residual.stride(0), delta.stride(0), out.stride(0))
    _add_rms_norm[(tokens,)](
        residual, delta, weight, out, size, eps, *strides, BLOCK=next_power_of_2(size), num_warps=_warps(size)
    )


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    return (x.stride(0), x.stride(1)) if x.ndim == 3 else (x.stride(0), 0)


def _warps(size: int) -> int:
    return 8 if size >= 4096 else 4 if size >= 512 else 1


@jit
def _rms_norm(x, weight, out, size, eps, x_token, x_head, out_token, out_head, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    valid = columns < size
    row = tl.load(x + token * x_token + head * x_head + columns, mask=valid, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(row * row) / size + eps)
    result = row * factor * tl.load(weight + columns, mask=valid, other=0.0)
    tl.store(out + token * out_token + head * out_head + columns, result.to(out.dtype.element_ty), mask=valid)


@jit
def _add_rms_norm(residual, delta, weight, out, size, eps, residual_token, delta_token, out_token, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    valid = columns < size
    at = residual + token * residual_token + columns
    row = tl.load(at, mask=valid, other=0.0)
    row += tl.load(delta + token * delta_token + columns, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, row, mask=valid)
    factor = 1.0 / tl.sqrt(tl.sum(row * row) / size + eps)
    result = row * factor * tl.load(weight + columns, mask=valid, other=0.0)
    tl.store(out + token * out_token + columns, result.to(out.dtype.element_ty), mask=valid)
