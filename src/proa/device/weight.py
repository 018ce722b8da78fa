"""Weights in GPU memory, in the format of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from proa.weights.formats import ROW_FORMATS
from proa.weights.raw_linear import RawLinear

__all__ = ["PlacedWeight", "dequantize", "place_weight", "stack_weights"]

# What numpy's stand-ins are in torch; other elements and scales stay bytes.
_ELEMENT_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_SCALE_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """A `RawLinear` of layout "rows" as tensors on one device.

    data: float32, bfloat16, float16 or int8 `[out, in]`, e4m3 as uint8 `[out, in]`, nibbles as uint8 `[out, in / 2]`.
    scales: as `RawLinear` has them, bf16 and fp16 as torch's types, e8m0 and e4m3 as uint8; None for plain formats.
    Heads stacked by `stack_weights` have one more dimension in front.
    """

    format: str
    out_features: int
    in_features: int
    data: torch.Tensor
    scales: torch.Tensor | None
    global_scale: float

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def place_weight(raw: RawLinear, device: torch.device) -> PlacedWeight:
    """Copies `raw`, layout "rows", to `device`; the caller may reuse its memory on return."""
    assert raw.layout == "rows", raw.layout
    row_format = ROW_FORMATS[raw.format]
    data = _copied(raw.data, _ELEMENT_DTYPES.get(row_format.element), device)
    scales = None if raw.scales is None else _copied(raw.scales, _SCALE_DTYPES.get(row_format.scale), device)
    return PlacedWeight(raw.format, raw.out_features, raw.in_features, data, scales, raw.global_scale)


def stack_weights(weights: Sequence[PlacedWeight]) -> PlacedWeight:
    """Weights of one shape and format as one, data `[heads, out, in]`."""
    scales = [weight.scales for weight in weights if weight.scales is not None]
    data = torch.stack([weight.data for weight in weights])
    return replace(weights[0], data=data, scales=torch.stack(scales) if scales else None)


def dequantize(weight: PlacedWeight) -> torch.Tensor:
    """Float32 `[..., out, in]`: exact for plain formats, else one float32 product (nvfp4: two)."""
    row_format = ROW_FORMATS[weight.format]
    elements = _elements(weight.data, row_format.element)
    if weight.scales is None:
        return elements
    scales = _scales(weight.scales, row_format.scale)
    if row_format.group == 0:
        return elements * scales[..., None]
    scales = scales.repeat_interleave(row_format.group, -1)[..., : weight.in_features]
    if row_format.rows > 1:
        scales = scales.repeat_interleave(row_format.rows, -2)[..., : weight.out_features, :]
    values = elements * scales
    return values * weight.global_scale if row_format.global_scale else values


def _copied(array: np.ndarray, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    # Only arrays that can be written become tensors without a warning; nothing here writes.
    source = torch.from_numpy(array if array.flags.writeable else array.copy())
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    target.copy_(source)
    return target if dtype is None else target.view(dtype)


def _elements(data: torch.Tensor, element: str) -> torch.Tensor:
    match element:
        case "int4":
            return _nibbles(data).float() - 8.0
        case "e2m1":
            table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=data.device)
            return table[_nibbles(data).long()]
        case "e4m3":
            return data.view(torch.float8_e4m3fn).float()
        case _:
            return data.float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., n / 2]` -> uint8 0..15 `[..., n]`, low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _scales(scales: torch.Tensor, scale: str) -> torch.Tensor:
    if scale == "e8m0":
        bits = scales.int()
        return torch.where(bits == 0, 0x400000, bits << 23).view(torch.float32)
    return scales.view(torch.float8_e4m3fn).float() if scale == "e4m3" else scales.float()
