"""The weight formats of `RawLinear` as data: what an element is, what scales it, and what a scale covers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

__all__ = ["ROW_FORMATS", "RowFormat"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of layout "rows".

    `group`: columns one scale covers, 0 for the whole row; `rows`: rows one scale covers. A group at the edge of a
    weight may be cut short where `ragged`.
    """

    element: Literal["f32", "bf16", "f16", "int4", "int8", "e4m3", "e2m1"]
    scale: Literal["none", "bf16", "f16", "f32", "e8m0", "e4m3"] = "none"
    group: int = 0
    rows: int = 1
    ragged: bool = False
    global_scale: bool = False

    @property
    def plain(self) -> bool:
        return self.scale == "none"

    @property
    def nibbles(self) -> bool:
        """Two elements to a byte."""
        return self.element in ("int4", "e2m1")

    @property
    def bytes_per_element(self) -> float:
        """Of a large weight, scales included but those of whole rows."""
        element = 0.5 if self.nibbles else _BYTES[self.element]
        return element + (_BYTES[self.scale] / (self.group * self.rows) if self.group else 0.0)

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Shape of the scales of a weight `[out, in]`; needs in to be a multiple of `group` unless ragged."""
        if self.group == 0:
            return (out_features,)
        return -(-out_features // self.rows), -(-in_features // self.group)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Of a weight `[out, in]`, scales included."""
        weights = out_features * in_features
        data = weights // 2 if self.nibbles else weights * _BYTES[self.element]
        return data + (0 if self.plain else prod(self.scale_shape(out_features, in_features)) * _BYTES[self.scale])


_BYTES = {"none": 0, "f32": 4, "bf16": 2, "f16": 2, "int8": 1, "e4m3": 1, "e8m0": 1}

ROW_FORMATS: dict[str, RowFormat] = {
    "f32": RowFormat("f32"),
    "bf16": RowFormat("bf16"),
    "f16": RowFormat("f16"),
    "int4_g32": RowFormat("int4", "bf16", 32),
    "int4_g64": RowFormat("int4", "bf16", 64),
    "int4_g128": RowFormat("int4", "bf16", 128),
    "int4_g32_f16": RowFormat("int4", "f16", 32),
    "int4_g64_f16": RowFormat("int4", "f16", 64),
    "int4_g128_f16": RowFormat("int4", "f16", 128),
    "int8_g128": RowFormat("int8", "bf16", 128, ragged=True),
    "int8_g32_f16": RowFormat("int8", "f16", 32),
    "fp8_block128": RowFormat("e4m3", "f32", 128, rows=128, ragged=True),
    "fp8_channel": RowFormat("e4m3", "f32"),
    "mxfp8": RowFormat("e4m3", "e8m0", 32),
    "mxfp4": RowFormat("e2m1", "e8m0", 32),
    "nvfp4": RowFormat("e2m1", "e4m3", 16, global_scale=True),
}
