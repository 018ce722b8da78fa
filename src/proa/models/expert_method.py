"""KTransformers' names for weight formats (`--kt-method`). Formats are detected; a name given is only held to them."""

from __future__ import annotations

from proa.core.errors import ConfigError
from proa.models.registry import checkpoint_config, decoder_spec
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
from proa.weights.experts import read_expert_linear
from proa.weights.linear import read_linear

__all__ = ["METHODS", "check_expert_method"]

_INT4 = ("int4_g32", "int4_g64", "int4_g128")
_INT4_F16 = ("int4_g32_f16", "int4_g64_f16", "int4_g128_f16")

# The formats of `RawLinear` behind each name; None for any.
METHODS: dict[str, tuple[str, ...] | None] = {
    "auto": None,
    "LLAMAFILE": None,  # whatever the GGUF files hold
    "RAWINT4": _INT4 + _INT4_F16,
    "GPTQ_INT4": _INT4 + _INT4_F16,
    "FP8": ("fp8_block128",),
    "FP8_PERCHANNEL": ("fp8_channel",),
    "BF16": ("bf16", "f16", "f32"),
    "MXFP4": ("mxfp4",),
    "MXFP8": ("mxfp8",),
    "NVFP4": ("nvfp4",),
    "AMXINT4": _INT4,
    "AMXINT8": ("int8_g128",),
}


def check_expert_method(checkpoint: Checkpoint, method: str, experts: ExpertSource | None = None) -> None:
    """ConfigError when the routed experts are stored in another format than `method` means.

    Looks at the first expert, in `experts` where they come from there. CheckpointError when it cannot be read.
    """
    expected = METHODS[method]
    if expected is None:
        return
    spec = decoder_spec(checkpoint_config(checkpoint))
    names, shape = spec.moe.names, (spec.moe.intermediate, spec.moe.hidden)
    prefix = f"model.layers.{min(spec.moe_layers)}.{spec.moe.block}.experts.0"
    for name, size in ((names.gate, shape), (names.up, shape), (names.down, shape[::-1])):
        linear = f"{prefix}.{name}"
        if experts is not None and linear in experts:
            found = experts.linear(linear, size).format
        else:
            found = (read_expert_linear(checkpoint, linear, size) or read_linear(checkpoint, linear, size)).format
        if found not in expected:
            fix = "leave --kt-method out: formats are detected; `proa convert` makes other ones"
            raise ConfigError("--kt-method", f"experts stored as {method} ({', '.join(expected)})", found, fix)
