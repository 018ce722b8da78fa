"""What goes where with the trunk on a GPU: refused with numbers before anything is loaded."""

from __future__ import annotations

from proa.core.errors import ConfigError
from proa.device.select import Gpu
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import RESERVE_BYTES, KVPlan, plan_kv
from proa.models import GpuBytes, ModelInfo

__all__ = ["check_expert_memory", "plan_gpu", "scratch_bytes"]

_GIB = 2**30
# Of what weights and scratch leave: the rest is for fragments, which torch's allocator has when sizes change.
_KV_FRACTION = 0.95
# Logits are there twice, and once more while they are sampled from, sorted with their indices of 8 bytes.
_BYTES_PER_LOGIT = 4 + 4 + 12


def scratch_bytes(config: EngineConfig, model: ModelInfo, needed: GpuBytes) -> int:
    """Scratch of forwards and of sampling."""
    return needed.scratch + config.max_running_requests * model.vocab_size * _BYTES_PER_LOGIT


def plan_gpu(config: EngineConfig, gpu: Gpu, model: ModelInfo, needed: GpuBytes) -> tuple[KVPlan, dict[str, str]]:
    """The KV cache in the memory that `needed` leaves of `gpu`, and what to say of it.

    Raises:
        ConfigError: the trunk, or a useful cache beside it, does not fit.
    """
    scratch = scratch_bytes(config, model, needed)
    available = gpu.free_bytes
    if config.mem_fraction_static is not None:
        static = int(gpu.total_bytes * config.mem_fraction_static)
        available = min(available, static + scratch + RESERVE_BYTES)
    plan = plan_kv(
        config,
        model.layout,
        model_context=model.max_position_embeddings,
        weight_bytes=needed.weights + scratch,
        available_bytes=available,
        # Float32 weights ask for more than bf16 holds; others gain nothing from a larger cache.
        auto_dtype="float32" if model.has_float32_trunk else "bfloat16",
        fraction=_KV_FRACTION,
        memory="GPU memory",
    )
    cache = plan.num_tokens * model.layout.elements_per_token() * (4 if plan.dtype == "float32" else 2)
    parts = {"trunk": needed.weights, "KV cache": cache, "scratch": scratch, "reserve": RESERVE_BYTES}
    table = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
    return plan, {
        "device": f"{gpu.name} (cuda:{gpu.index})",
        "gpu_memory": f"{table} of {gpu.free_bytes / _GIB:.2f} GiB free",
    }


def check_expert_memory(expert_bytes: int, available_bytes: int) -> None:
    """Raises ConfigError when routed experts of `expert_bytes` do not fit the RAM."""
    if expert_bytes + RESERVE_BYTES > available_bytes:
        expected = f"{(expert_bytes + RESERVE_BYTES) / _GIB:.2f} GiB for the routed experts, reserve included"
        raise ConfigError("memory", expected, f"{available_bytes / _GIB:.2f} GiB available", "free memory")
