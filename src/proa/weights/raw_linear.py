"""One weight matrix as a checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["RawLinear"]


@dataclass(frozen=True, slots=True)
class RawLinear:
    """A weight `[out, in]` as stored, in the arrays `proa.native` packs.

    format               data                           scales
    f32, bf16, f16       float32, uint16, uint16        None
    int4_gG              uint8 [out, in / 2]            uint16 (bf16) [out, in / G]       G = 32, 64 or 128
    int4_gG_f16          uint8 [out, in / 2]            uint16 (fp16) [out, in / G]
    int8_g128            int8 [out, in]                 uint16 (bf16) [out, ceil(in / 128)]
    int8_g32_f16         int8 [out, in]                 uint16 (fp16) [out, in / 32]
    fp8_block128         uint8 (e4m3) [out, in]         float32 [ceil(out / 128), ceil(in / 128)]
    fp8_channel          uint8 (e4m3) [out, in]         float32 [out]
    mxfp8                uint8 (e4m3) [out, in]         uint8 (e8m0) [out, in / 32]
    mxfp4                uint8 (e2m1) [out, in / 2]     uint8 (e8m0) [out, in / 32]
    nvfp4                uint8 (e2m1) [out, in / 2]     uint8 (e4m3) [out, in / 16]

    Of two nibbles in byte b the low one is element 2b, the high one 2b + 1; an int4 nibble u is the integer u - 8.
    A value is its element times the scale of its group; nvfp4 multiplies by `global_scale` too, all others have 1.

    layout "ggml": `data` uint8 [out, bytes of a row], the blocks of a GGUF file; no scales.
    bias: float32 [out], added to the product; None for none.
    """

    format: str
    out_features: int
    in_features: int
    data: np.ndarray
    scales: np.ndarray | None
    global_scale: float = 1.0
    layout: str = "rows"
    bias: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
