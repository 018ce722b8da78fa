"""Which `quantization_config` proa can serve. The format itself is detected tensor by tensor in `linear`."""

from __future__ import annotations

from typing import Any

from proa.core.errors import CheckpointError, UnsupportedError

__all__ = ["FP8_BLOCK", "INT4_GROUP", "SUPPORTED_QUANTIZATION", "check_quantization"]

INT4_GROUP = 32
FP8_BLOCK = 128

SUPPORTED_QUANTIZATION = (
    "compressed-tensors pack-quantized (int4, symmetric, groups of 32)",
    "fp8 (e4m3, weight_block_size [128, 128])",
    "none (bf16, fp16 or fp32 weights)",
)

_INT4_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": INT4_GROUP,
}


def check_quantization(config: Any, where: str) -> None:
    """Accept None or a supported `quantization_config` object.

    UnsupportedError listing what is supported for another method; CheckpointError when it is not an object.
    """
    if config is None:
        return
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: quantization_config", "an object", type(config).__name__)
    method = config.get("quant_method")
    if method == "compressed-tensors":
        _check_compressed_tensors(config, where)
    elif method == "fp8":
        _expect(config, {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]}, where)
        if config.get("fmt", "e4m3") != "e4m3":
            raise _unsupported(where, f"fmt {config['fmt']!r}")
    else:
        raise _unsupported(where, f"quant_method {method!r}")


def _check_compressed_tensors(config: dict[str, Any], where: str) -> None:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: quantization_config.config_groups", "a non-empty object", repr(groups)[:200])
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(
                f"{where}: quantization_config.config_groups", "weights as an object", repr(weights)[:200]
            )
        if config.get("format") != "pack-quantized" and group.get("format") != "pack-quantized":
            raise _unsupported(where, f"compressed-tensors format {config.get('format')!r}")
        _expect(weights, _INT4_WEIGHTS, where)
        # Quantized activations would be another numeric contract; reordered groups another layout.
        if group.get("input_activations") is not None:
            raise _unsupported(where, "quantized input_activations")
        if weights.get("actorder") not in (None, "static", "weight"):
            raise _unsupported(where, f"actorder {weights['actorder']!r}")


def _expect(config: dict[str, Any], values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        if config.get(key) != value:
            raise _unsupported(where, f"{key} {config.get(key)!r}")


def _unsupported(where: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: quantization_config", f"one of: {'; '.join(SUPPORTED_QUANTIZATION)}", got[:200])
