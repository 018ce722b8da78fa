"""The formats that checkpoints are written in: from float32, as tensors, and as `quantization_config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from proa.weights.formats import ROW_FORMATS
from proa.weights.linear import RawLinear

__all__ = ["FORMATS", "quantization_config", "stored_tensors"]

# int8_g32_f16 is left out: only GGUF files have it.
FORMATS = ("bf16", "f32", "f16", *(n for n, row in ROW_FORMATS.items() if not row.plain and n != "int8_g32_f16"))

_PLAIN_DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
_IGNORE_KEYS = {"compressed-tensors": "ignore", "modelopt": "ignore"}


def stored_tensors(linear: RawLinear) -> dict[str, tuple[str, np.ndarray]]:
    """The tensors of a linear as checkpoints store its format: suffix -> (safetensors type, values)."""
    if linear.scales is None:
        data = linear.data.view(np.float16) if linear.format == "f16" else linear.data
        return {"weight": (_PLAIN_DTYPES[linear.format], data)}
    match ROW_FORMATS[linear.format].element, linear.format:
        case "int4", name:
            halves = name.endswith("_f16")
            return {
                "weight_shape": ("I64", np.array([linear.out_features, linear.in_features])),
                "weight_packed": ("I32", np.ascontiguousarray(linear.data).view("<i4")),
                "weight_scale": ("F16" if halves else "BF16", linear.scales.view(np.float16 if halves else np.uint16)),
            }
        case _, "int8_g128":
            return {"weight": ("I8", linear.data), "weight_scale": ("BF16", linear.scales)}
        case _, "fp8_block128":
            return {"weight": ("F8_E4M3", linear.data), "weight_scale_inv": ("F32", linear.scales)}
        case _, "fp8_channel":
            return {"weight": ("F8_E4M3", linear.data), "weight_scale": ("F32", linear.scales[:, None])}
        case _, "mxfp8":
            return {"weight": ("F8_E4M3", linear.data), "weight_scale_inv": ("U8", linear.scales)}
        case _, "mxfp4":
            return {"weight_packed": ("U8", linear.data), "weight_scale": ("U8", linear.scales)}
        case _, "nvfp4":
            return {
                "weight": ("U8", linear.data),
                "weight_scale": ("F8_E4M3", linear.scales),
                "weight_scale_2": ("F32", np.array(linear.global_scale, np.float32)),
            }
    raise AssertionError(f"no way to store {linear.format}")


def quantization_config(to: str, ignore: Sequence[str]) -> dict[str, Any] | None:
    """`quantization_config` of config.json for experts of format `to`; `ignore` names what stays unquantized."""
    config = _quantization(to)
    if config is None:
        return None
    return {**config, _IGNORE_KEYS.get(config["quant_method"], "modules_to_not_convert"): list(ignore)}


def _quantization(to: str) -> dict[str, Any] | None:
    row_format = ROW_FORMATS[to]
    if row_format.plain or to == "int8_g128":  # no quant_method means int8_g128, which is proa's own
        return None
    if row_format.element == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": row_format.group}
        return _compressed_tensors("pack-quantized", weights)
    match to:
        case "fp8_block128":
            return _FP8 | {"weight_block_size": [128, 128]}
        case "mxfp8":
            return _FP8 | {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
        case "fp8_channel":
            return _compressed_tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})
        case "mxfp4":
            weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"}
            return _compressed_tensors("mxfp4-pack-quantized", weights)
        case "nvfp4":
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None}
    raise AssertionError(f"no way to store {to}")


_FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def _compressed_tensors(name: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": {**weights, "symmetric": True, "dynamic": False, "observer": "minmax"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
