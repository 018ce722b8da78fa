"""What `proa bench hybrid` measures: a stack of layers of a model's dimensions, and what a whole model follows to.

Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from proa.cli.bench_experts_spec import ExpertSpec, make_spec
from proa.core.errors import ConfigError

__all__ = ["MAX_BATCH", "TRUNKS", "HybridSpec", "TrunkDims", "make_hybrid_spec"]

MAX_BATCH = 16  # tokens of a decode step


@dataclass(frozen=True, slots=True)
class TrunkDims:
    """The rest of a layer with MLA attention, and how many MoE layers the model has."""

    layers: int
    heads: int
    q_rank: int
    kv_rank: int
    head_dim: int  # without the rotary part
    rope_dim: int
    value_dim: int
    shared_intermediate: int


# From the published configurations.
TRUNKS = {
    "kimi-k2": TrunkDims(60, 64, 1536, 512, 128, 64, 128, 2048),
    "deepseek-v3": TrunkDims(58, 128, 1536, 512, 128, 64, 128, 2048),
}


@dataclass(frozen=True, slots=True)
class HybridSpec:
    """One run: `layers` MoE layers in memory, decode steps of `batches` tokens, prompts of `prompts` in a pass each.

    `gpu_experts`: per layer. `deferred`: experts of a token that come a layer late. `skew`: of a routing that experts
    follow (`bench_hybrid_updates`); None: they stay. `parts`: of the ring that experts cross through, each of
    `part_experts`.
    """

    experts: ExpertSpec
    trunk: TrunkDims
    layers: int
    prompts: tuple[int, ...]
    gpu_experts: int
    skew: float | None = None
    deferred: int = 0
    parts: int = 4
    part_experts: int = 96
    batches: tuple[int, ...] = (1,)

    @property
    def layer_bytes(self) -> int:
        """The routed experts of one layer."""
        return self.experts.dims.experts * self.experts.bytes_per_expert


def make_hybrid_spec(
    *,
    model: str,
    layers: int,
    method: str = "RAWINT4",
    prompts: tuple[int, ...] = (8192, 32768),
    batches: tuple[int, ...] = (1,),
    gpu_experts: int = 0,
    skew: float | None = None,
    deferred: int = 0,
    threads: int | None = None,
    seconds: float = 2.0,
    available: int | None = None,
) -> HybridSpec:
    """The run that was asked for, with fewer layers when `available` bytes of memory do not hold them.

    Raises:
        ConfigError: an unknown name, numbers out of range, or too little memory for one layer.
    """
    if model not in TRUNKS:
        raise ConfigError("--model", " | ".join(TRUNKS), repr(model))
    experts = make_spec(method=method, tokens=(1,), model=model, threads=threads, seconds=seconds)
    if layers < 1:
        raise ConfigError("--layers", "at least 1", layers)
    if not 0 <= gpu_experts <= experts.dims.experts:
        raise ConfigError("--gpu-experts", f"0 to {experts.dims.experts}", gpu_experts)
    if not all(1 <= tokens <= 1 << 16 for tokens in prompts):
        raise ConfigError("--prompts", "1 to 65536 tokens each", prompts)
    if not all(1 <= tokens <= MAX_BATCH for tokens in batches):
        raise ConfigError("--batches", f"1 to {MAX_BATCH} tokens each", batches)
    if skew is not None and not (0 <= skew <= 4 and gpu_experts):
        raise ConfigError("--skew", "0 to 4, with --gpu-experts", skew)
    spec = HybridSpec(experts, TRUNKS[model], layers, prompts, gpu_experts, skew, deferred, batches=batches)
    if available is None:
        return spec
    fitting = available // spec.layer_bytes
    if fitting < 1:
        raise ConfigError("memory", f"{spec.layer_bytes / 1e9:.1f} GB free", f"{available / 1e9:.1f} GB")
    return replace(spec, layers=min(layers, fitting))
