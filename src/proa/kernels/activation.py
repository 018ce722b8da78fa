"""Gated activations: what joins the outputs of gate and up."""

from __future__ import annotations

import torch

from proa.kernels.triton_import import jit, tl

__all__ = ["SILU", "SWIGLU_OAI", "activate", "gated_product", "gating_code"]

SILU, SWIGLU_OAI = 0, 1
_CODES = {"silu": SILU, "swigluoai": SWIGLU_OAI}
_BLOCK = 1024


def gating_code(gating: str) -> int:
    """The number by which kernels know the gating "silu" or "swigluoai"."""
    return _CODES[gating]


def gated_product(
    gate_up: torch.Tensor, out: torch.Tensor, *, gating: str = "silu", limit: float = float("inf"), alpha: float = 1.0
) -> None:
    """`out = g * sigmoid(g) * u` ("silu") or `g * sigmoid(alpha * g) * (u + 1)` ("swigluoai"), in float32.

    With g = min(gate, limit) and u = clamp(up, -limit, limit). gate_up: float32 or bf16 `[T, 2 I]`, gate before up;
    out: float32 or bf16 `[T, I]`; rows strided.
    """
    tokens, size = out.shape
    if tokens == 0:
        return
    _gated_product[(tokens, -(-size // _BLOCK))](
        gate_up,
        out,
        size,
        limit,
        alpha,
        gate_up.stride(0),
        out.stride(0),
        GATING=gating_code(gating),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@jit
def activate(gate, up, limit, alpha, GATING: tl.constexpr):
    """The activation of float32 tensors of one shape; 0 is "silu", 1 "swigluoai"."""
    g = tl.minimum(gate, limit)
    u = tl.minimum(tl.maximum(up, -limit), limit)
    if GATING == 0:
        return g / (1.0 + tl.exp(-g)) * u
    else:
        return g / (1.0 + tl.exp(-alpha * g)) * (u + 1.0)


@jit
def _gated_product(
    gate_up, out, size, limit, alpha, gate_up_token, out_token, GATING: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < size
    gate = tl.load(gate_up + token * gate_up_token + columns, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_token + size + columns, mask=valid, other=0.0).to(tl.float32)
    result = activate(gate, up, limit, alpha, GATING)
    tl.store(out + token * out_token + columns, result.to(out.dtype.element_ty), mask=valid)
