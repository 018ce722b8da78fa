"""The trunk on a GPU: weights as the checkpoint has them in its memory, float32 activations.

Few tokens are bound by reading weights: their activations keep 16 bits of precision or all 24. Many tokens are bound by
arithmetic: activations are rounded to bf16. Weights of few bits are rounded to bf16 for the tensor cores. Sums are
float32.
Float32 weights are multiplied in float32 for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from proa.device.backend import HeadsWeight, Weight
from proa.device.weight import PlacedWeight, dequantize, place_weight, stack_weights
from proa.native.ops import PackedWeight
from proa.native.runtime import CpuRuntime
from proa.weights.formats import ROW_FORMATS
from proa.weights.raw_linear import RawLinear

__all__ = ["FEW_TOKENS", "GpuDevice", "LinearKernels", "TrunkKernels"]

_PLAIN = ("f32", "bf16")
# Up to this many tokens a linear reads its weight about as fast as for one.
FEW_TOKENS = 16


class TrunkKernels(Protocol):
    """The operations on rows, by a module of `proa.kernels`."""

    embedding_rows: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    rope: Callable[..., None]
    gated_product: Callable[..., None]
    route: Callable[..., None]


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """Functions of `proa.kernels` of these names, and the weight formats of the first.

    `linear` rounds weights of few bits to bf16, but for a handful of tokens. `is_fast(tokens, out_features)`: whether
    it multiplies float32 weights faster than cuBLAS.
    """

    linear: Callable[..., None]
    heads_linear: Callable[..., None]
    formats: frozenset[str]
    is_fast: Callable[[int, int], bool]

    def reads(self, weight: PlacedWeight) -> bool:
        return weight.format in self.formats and (ROW_FORMATS[weight.format].plain or weight.in_features % 32 == 0)


class GpuDevice:
    """`torch_device` may be any that torch has; tests run it on the CPU's.

    `linears` None: weights are expanded in memory before they are multiplied.
    `few_tokens`: the most for which a linear keeps activations in float32.
    """

    name = "cuda"

    def __init__(
        self,
        runtime: CpuRuntime,
        torch_device: torch.device,
        kernels: TrunkKernels,
        *,
        linears: LinearKernels | None = None,
        few_tokens: int = FEW_TOKENS,
    ) -> None:
        self.runtime = runtime
        self.torch_device = torch_device
        self.linears = linears
        self.few_tokens = few_tokens
        self.embedding_rows = kernels.embedding_rows
        self.rms_norm = kernels.rms_norm
        self.add_rms_norm = kernels.add_rms_norm
        self.rope = kernels.rope
        self.gated_product = kernels.gated_product
        self.route = kernels.route

    def place(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.torch_device)

    def place_table(self, table: np.ndarray) -> torch.Tensor:
        weight_format = "bf16" if table.dtype == np.uint16 else "f32"
        return place_weight(
            RawLinear(weight_format, table.shape[0], table.shape[1], table, None), self.torch_device
        ).data

    def rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=self.torch_device)

    def host_rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, pin_memory=self.torch_device.type == "cuda")

    def pack(self, raw: RawLinear) -> Weight:
        return _GpuWeight(self, self._placed(raw))

    def pack_heads(self, raws: Sequence[RawLinear]) -> HeadsWeight:
        stacked = stack_weights([self._placed(raw) for raw in raws])
        if self.linears is not None and stacked.format not in _PLAIN:
            # As the kernels of other linears round it.
            stacked = replace(stacked, format="bf16", data=dequantize(stacked).bfloat16(), scales=None)
        return _GpuHeadsWeight(self, stacked)

    def _placed(self, raw: RawLinear) -> PlacedWeight:
        if raw.layout != "rows":  # blocks of a GGUF file
            values = PackedWeight.pack(self.runtime.pool, raw).dequantize()
            raw = replace(raw, format="f32", data=values, scales=None, layout="rows")
        return place_weight(raw, self.torch_device)


class _GpuWeight:
    __slots__ = ("_device", "_weight", "in_features", "nbytes", "out_features")

    def __init__(self, device: GpuDevice, weight: PlacedWeight) -> None:
        self._device = device
        self._weight = weight
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.nbytes = weight.nbytes

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, accumulate: bool = False
    ) -> None:
        device, weight = self._device, self._weight
        linears = device.linears
        if linears is not None and linears.reads(weight) and not _is_cublas_faster(device, linears, x, weight):
            linears.linear(
                x,
                weight.data,
                weight.scales,
                out,
                weight_format=weight.format,
                bias=bias,
                accumulate=accumulate,
            )
            return
        left, right = _operands(device, x, weight)
        if bias is None and not accumulate and left.dtype == torch.bfloat16 and left.is_cuda and out.is_contiguous():
            torch.mm(left, right.T, out_dtype=torch.float32, out=out)
            return
        product = _product(left, right.T)
        if bias is not None:
            product += bias
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)


class _GpuHeadsWeight:
    __slots__ = ("_device", "_weight", "nbytes")

    def __init__(self, device: GpuDevice, weight: PlacedWeight) -> None:
        self._device = device
        self._weight = weight
        self.nbytes = weight.nbytes

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        linears = self._device.linears
        if linears is not None and x.shape[0] <= self._device.few_tokens:
            linears.heads_linear(x, self._weight.data, out)
            return
        left, right = _operands(self._device, x, self._weight)
        out.copy_(_product(left.transpose(0, 1), right.mT).transpose(0, 1))

    def values(self) -> torch.Tensor:
        return self._weight.data if self._weight.format == "bf16" else dequantize(self._weight).bfloat16()


def _is_cublas_faster(device: GpuDevice, linears: LinearKernels, x: torch.Tensor, weight: PlacedWeight) -> bool:
    """Products of many tokens with plain weights."""
    if weight.format == "f32":
        return not linears.is_fast(x.shape[0], weight.out_features)
    return weight.format == "bf16" and x.shape[0] > device.few_tokens


def _operands(device: GpuDevice, x: torch.Tensor, weight: PlacedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and weight as they are multiplied."""
    if x.shape[0] <= device.few_tokens or ROW_FORMATS[weight.format].element == "f32":
        return x, dequantize(weight)
    values = weight.data if weight.format == "bf16" else dequantize(weight).bfloat16()
    return x.bfloat16(), values


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Float32 product of two or three dimensions."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    if left.dtype == torch.float32 or left.device.type != "cuda":
        return multiply(left, right).float()
    product: torch.Tensor = multiply(left, right, out_dtype=torch.float32)
    return product
