"""What `quantization_config` says of a checkpoint's weights. The format itself is detected tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proa.core.errors import CheckpointError, UnsupportedError

__all__ = ["FP8_BLOCK", "INT4_GROUPS", "MX_GROUP", "SUPPORTED_QUANTIZATION", "Quantization", "parse_quantization"]

INT4_GROUPS = (32, 64, 128)
FP8_BLOCK = 128
MX_GROUP = 32

SUPPORTED_QUANTIZATION = (
    "compressed-tensors pack-quantized (int4, symmetric, groups of 32, 64 or 128)",
    "compressed-tensors float-quantized (fp8 per channel or in 128 x 128 blocks)",
    "compressed-tensors mxfp4-pack-quantized, nvfp4-pack-quantized, mxfp8-quantized",
    "fp8 (e4m3, weight_block_size [128, 128]; expert_dtype fp4)",
    "mxfp8 (weight_block_size [1, 32])",
    "mxfp4",
    "modelopt NVFP4",
    "gptq (4 bits, sym true, desc_act false, groups of 32, 64 or 128)",
    "none (bf16, fp16 or fp32 weights)",
)

_INT4_FORMATS = {group: (f"int4_g{group}", f"int4_g{group}_f16") for group in INT4_GROUPS}


@dataclass(frozen=True, slots=True)
class Quantization:
    """`formats`: those of `RawLinear` that quantized linears may have, None where config.json says nothing.

    `gptq_zero`: the stored zero point of GPTQ's checkpoint_format, None where it is not said.
    """

    formats: frozenset[str] | None = None
    gptq_zero: int | None = None


def parse_quantization(config: Any, where: str) -> Quantization:
    """A `quantization_config` object, or None for a checkpoint without.

    UnsupportedError listing what is supported for another method; CheckpointError when it is not an object.
    """
    if config is None:
        return Quantization()
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: quantization_config", "an object", type(config).__name__)
    method = config.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _unsupported(where, f"quant_method {method!r}")
    formats = frozenset(reader(config, where))
    zero = {"gptq": 7, "gptq_v2": 8}.get(str(config.get("checkpoint_format"))) if method == "gptq" else None
    return Quantization(formats, zero)


def _fp8(config: dict[str, Any], where: str) -> tuple[str, ...]:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(where, f"fmt {config['fmt']!r}")
    block = config.get("weight_block_size")
    if block == [1, MX_GROUP]:
        return ("mxfp8",)
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise _unsupported(where, f"weight_block_size {block!r}")
    expert_dtype = config.get("expert_dtype", "fp8")
    if expert_dtype not in ("fp8", "fp4"):
        raise _unsupported(where, f"expert_dtype {expert_dtype!r}")
    return ("fp8_block128", "mxfp4") if expert_dtype == "fp4" else ("fp8_block128",)


def _mxfp8(config: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect({"weight_block_size": [1, MX_GROUP]} | config, {"weight_block_size": [1, MX_GROUP]}, where)
    return ("mxfp8",)


def _modelopt(config: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect(config, {"quant_algo": "NVFP4"}, where)
    return ("nvfp4",)


def _gptq(config: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect({"desc_act": False} | config, {"bits": 4, "sym": True, "desc_act": False}, where)
    return _int4_formats(config, where)


def _compressed_tensors(config: dict[str, Any], where: str) -> tuple[str, ...]:
    groups = config.get("config_groups")
    where_groups = f"{where}: quantization_config.config_groups"
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(where_groups, "a non-empty object", repr(groups)[:200])
    formats: tuple[str, ...] = ()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(where_groups, "weights as an object", repr(weights)[:200])
        name = group.get("format") or config.get("format")
        reader = _COMPRESSED_FORMATS.get(name) if isinstance(name, str) else None
        if reader is None:
            raise _unsupported(where, f"compressed-tensors format {name!r}")
        formats += reader(weights, where)
        _check_activations(group.get("input_activations"), where)
    return formats


def _check_activations(activations: Any, where: str) -> None:
    """Activations that a GPU would quantize on the fly are left as they are here; fixed ranges would cut them."""
    if activations is None:
        return
    if not isinstance(activations, dict) or activations.get("dynamic") not in (True, "local"):
        raise _unsupported(where, "input_activations with static scales")


def _pack_quantized(weights: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect(weights, {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}, where)
    if weights.get("actorder") not in (None, "static", "weight"):  # others reorder the groups
        raise _unsupported(where, f"actorder {weights['actorder']!r}")
    return _int4_formats(weights, where)


def _mxfp4_packed(weights: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect(weights, {"num_bits": 4, "type": "float", "symmetric": True, "group_size": MX_GROUP}, where)
    return ("mxfp4",)


def _nvfp4_packed(weights: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect(weights, {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}, where)
    return ("nvfp4",)


def _mxfp8_quantized(weights: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect(weights, {"num_bits": 8, "type": "float", "symmetric": True, "group_size": MX_GROUP}, where)
    return ("mxfp8",)


def _float_quantized(weights: dict[str, Any], where: str) -> tuple[str, ...]:
    _expect(weights, {"num_bits": 8, "type": "float", "symmetric": True}, where)
    if weights.get("strategy") == "block":
        _expect(weights, {"block_structure": [FP8_BLOCK, FP8_BLOCK]}, where)
        return ("fp8_block128",)
    _expect(weights, {"strategy": "channel"}, where)
    return ("fp8_channel",)


def _int4_formats(config: dict[str, Any], where: str) -> tuple[str, ...]:
    group = config.get("group_size")
    if not isinstance(group, int) or group not in _INT4_FORMATS:
        raise _unsupported(where, f"group_size {group!r}")
    return _INT4_FORMATS[group]


def _expect(config: dict[str, Any], values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        if config.get(key) != value:
            raise _unsupported(where, f"{key} {config.get(key)!r}")


def _unsupported(where: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: quantization_config", f"one of: {'; '.join(SUPPORTED_QUANTIZATION)}", got[:200])


_Reader = Callable[[dict[str, Any], str], tuple[str, ...]]

_METHODS: dict[str, _Reader] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda _config, _where: ("mxfp4",),
    "mxfp8": _mxfp8,
}

_COMPRESSED_FORMATS: dict[str, _Reader] = {
    "float-quantized": _float_quantized,
    "mxfp4-pack-quantized": _mxfp4_packed,
    "mxfp8-quantized": _mxfp8_quantized,
    "nvfp4-pack-quantized": _nvfp4_packed,
    "pack-quantized": _pack_quantized,
}
