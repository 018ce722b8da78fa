"""float32 weights -> the stored formats, and the `quantization_config` that goes with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from proa.weights.linear import RawLinear
from proa.weights.quantize import quantize

__all__ = ["FORMATS", "encode", "quantization_config"]

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
    """float32 `[out, in]` -> the format `to`; in has to be a multiple of its group."""
    return quantize(weight, to)


def quantization_config(to: str, ignore: Sequence[str]) -> dict[str, Any] | None:
    """`quantization_config` of config.json for experts of format `to`; `ignore` names what stays unquantized."""
    if to == "int4_g32":
        return {**_INT4_QUANTIZATION, "ignore": list(ignore)}
    if to == "fp8_block128":
        return {**_FP8_QUANTIZATION, "modules_to_not_convert": list(ignore)}
    return None
