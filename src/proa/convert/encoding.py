"""float32 weights -> the stored formats, and the `quantization_config` that goes with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from proa.weights.bfloat16 import bf16_from_f32
from proa.weights.linear import RawLinear
from proa.weights.quantize import quantize_fp8_block128, quantize_int4_g32

__all__ = ["FORMATS", "encode", "quantization_config"]

_CHUNK_ROWS = 4096

FORMATS = ("bf16", "f32", "int4_g32", "fp8_block128")

_FP8_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

_INT4_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
}


def encode(weight: np.ndarray, to: str) -> RawLinear:
    """float32 `[out, in]` -> the format `to`; int4_g32 needs in to be a multiple of 32."""
    weight = np.ascontiguousarray(weight, np.float32)
    out_features, in_features = weight.shape
    if to == "f32":
        return RawLinear("f32", out_features, in_features, weight, None)
    if to == "bf16":
        return RawLinear("bf16", out_features, in_features, bf16_from_f32(weight), None)
    quantize = quantize_int4_g32 if to == "int4_g32" else quantize_fp8_block128
    # Blocks end on multiples of _CHUNK_ROWS rows, so the parts are those of the whole, at a fraction of the memory.
    parts = [quantize(weight[begin : begin + _CHUNK_ROWS]) for begin in range(0, out_features, _CHUNK_ROWS)]
    scales = np.concatenate([part.scales for part in parts if part.scales is not None])
    return RawLinear(to, out_features, in_features, np.concatenate([part.data for part in parts]), scales)


def quantization_config(to: str, ignore: Sequence[str]) -> dict[str, Any] | None:
    """`quantization_config` of config.json for experts of format `to`; `ignore` names what stays unquantized."""
    if to == "int4_g32":
        return {**_INT4_QUANTIZATION, "ignore": list(ignore)}
    if to == "fp8_block128":
        return {**_FP8_QUANTIZATION, "modules_to_not_convert": list(ignore)}
    return None
