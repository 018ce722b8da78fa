"""What goes where with the trunk on a GPU: refused with numbers before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from proa.attention.shape import gpu_block_tokens
from proa.core.errors import MemoryShortageError
from proa.device.select import Gpu
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import MAX_MOVES, expert_budget, expert_count_asked, place_experts, with_experts
from proa.engine.kv_plan import MIN_AUTO_TOKENS, RESERVE_BYTES, KVPlan, cache_dtype, plan_kv
from proa.engine.working_memory import gpu_rows
from proa.kvcache.pool import KVDtype, kv_bytes_per_token
from proa.models import ExpertPlan, GpuBytes, ModelInfo
from proa.moe.deferral import DeferralPlan
from proa.moe.hybrid_layers import COPIED_TOGETHER
from proa.weights.read_ahead import WINDOW_BYTES

__all__ = [
    "KV_FRACTION",
    "buffer_share",
    "check_expert_memory",
    "fit_experts",
    "loading_bytes",
    "plan_gpu",
    "scratch_bytes",
    "vram_rows",
    "with_ram",
]

_GIB = 2**30
# Of what weights and scratch leave: the rest is for fragments, which torch's allocator has when sizes change.
KV_FRACTION = 0.95
# Requests of full length that the cache is to hold before free memory is for experts.
_FULL_REQUESTS = 4
# A smaller part of the experts than this is not worth a shorter context.
_WORTHWHILE = 0.02


def scratch_bytes(config: EngineConfig, model: ModelInfo, needed: GpuBytes) -> int:
    """All that is neither weights nor KV cache."""
    return sum(gpu_rows(config, model, needed).values())


def fit_experts(
    config: EngineConfig, gpu: Gpu, model: ModelInfo, trunk: GpuBytes, *, expert_bytes: int, max_tokens: int
) -> ExpertPlan:
    """The experts for the GPU: those asked for as far as they fit, else what the KV cache leaves room for.

    Without a number of experts the cache comes first: the context of some requests, in at most half of the room; of one
    where every expert then fits, or where the other half would hold too few experts to matter. `expert_bytes`: of all
    experts; `max_tokens`: of a forward.

    Raises:
        ConfigError: as `expert_budget` and `place_experts`, or all experts of a token are to be late.
    """
    info, all_experts = model.experts, model.experts.layers * model.experts.experts
    DeferralPlan.create(info.layers, info.top_k, config.max_deferred_experts)  # refused before anything is read
    left = max(0, gpu.free_bytes - trunk.weights)
    place = partial(place_experts, config, info, all_bytes=expert_bytes, left_bytes=left)
    size = partial(with_experts, trunk, info=info, all_bytes=expert_bytes, max_tokens=max_tokens)
    asked = expert_budget(config, info)
    wanted = all_experts if asked is None else asked.gpu_experts
    if wanted == 0:
        return place(0)
    one = place(1)
    expert = -(-expert_bytes // all_experts)
    base = size(plan=one)
    room = _available(config, gpu, scratch_bytes(config, model, base)) - scratch_bytes(config, model, base)
    room = int((room - RESERVE_BYTES - base.weights + expert * (1 + one.moves)) * KV_FRACTION)
    cache, full = _cache_bytes(config, model, room, automatic=asked is None), _context_bytes(config, model)
    if asked is None and config.max_total_tokens is None:
        if room - all_experts * expert >= min(cache, full):
            return place(all_experts)
        if (room - cache) // expert < _WORTHWHILE * all_experts:
            cache = max(cache, min(full, room))
    fitting = max(0, room - cache) // expert
    if config.expert_updates and fitting < all_experts:
        fitting = max(fitting - MAX_MOVES, fitting // 2)  # each that moves needs a slot to come to
    return place(min(wanted, fitting))


def _cache_bytes(config: EngineConfig, model: ModelInfo, room: int, *, automatic: bool) -> int:
    """Of the KV cache that experts leave alone."""
    token = _token_bytes(config, model)
    if config.max_total_tokens is not None:
        return config.max_total_tokens * token
    context = (config.context_length or model.max_position_embeddings) + _block(config, model)
    least = context * token if config.context_length is not None else min(context, MIN_AUTO_TOKENS) * token
    if not automatic:
        return least
    return max(least, min(min(config.requests, _FULL_REQUESTS) * context * token, room // 2))


def _context_bytes(config: EngineConfig, model: ModelInfo) -> int:
    """The cache of one request of full length."""
    context = (config.context_length or model.max_position_embeddings) + _block(config, model)
    return context * _token_bytes(config, model)


def _token_bytes(config: EngineConfig, model: ModelInfo) -> int:
    return kv_bytes_per_token(model.layout, cache_dtype(config, _auto_dtype(model)))


def _block(config: EngineConfig, model: ModelInfo) -> int:
    return config.block_size or gpu_block_tokens(model.layout)


def _auto_dtype(model: ModelInfo) -> KVDtype:
    """Float32 weights ask for more than bf16 holds; others gain nothing from a larger cache."""
    return "float32" if model.has_float32_trunk else "bfloat16"


def _available(config: EngineConfig, gpu: Gpu, scratch: int) -> int:
    """Bytes for everything. `--mem-fraction-static` bounds weights and cache, not `scratch`."""
    if config.mem_fraction_static is None:
        return gpu.free_bytes
    return min(gpu.free_bytes, int(gpu.total_bytes * config.mem_fraction_static) + scratch + RESERVE_BYTES)


def buffer_share(
    config: EngineConfig, gpu: Gpu, model: ModelInfo, needed: GpuBytes, placed: ExpertPlan, trunk: GpuBytes
) -> float:
    """What part scratch and ring are of the memory that the weights of `trunk` leave."""
    scratch = scratch_bytes(config, model, needed)
    left = _available(config, gpu, scratch) - trunk.weights - RESERVE_BYTES
    return (scratch + placed.ring_bytes) / max(1, left)


def _bound(config: EngineConfig, gpu: Gpu, scratch: int) -> str:
    """What of `_available` the flag takes away, in words."""
    if config.mem_fraction_static is None or _available(config, gpu, scratch) == gpu.free_bytes:
        return ""
    of = f"--mem-fraction-static {config.mem_fraction_static:g} of {gpu.total_bytes / _GIB:.2f} GiB"
    return f" ({of}, beside scratch and reserve; {gpu.free_bytes / _GIB:.2f} GiB are free)"


def plan_gpu(
    config: EngineConfig,
    gpu: Gpu,
    model: ModelInfo,
    needed: GpuBytes,
    placed: ExpertPlan | None = None,
) -> tuple[KVPlan, dict[str, str]]:
    """The KV cache in the memory that `needed`, with the experts `placed`, leaves of `gpu`, and what to say of both.

    Raises:
        ConfigError: the trunk, or a useful cache beside it, does not fit.
    """
    scratch = scratch_bytes(config, model, needed)
    plan = plan_kv(
        config,
        model.layout,
        model_context=model.max_position_embeddings,
        weight_bytes=needed.weights + scratch,
        available_bytes=_available(config, gpu, scratch),
        auto_dtype=_auto_dtype(model),
        auto_block=_block(config, model),
        fraction=KV_FRACTION,
        memory="GPU memory",
        bound=_bound(config, gpu, scratch),
    )
    notes = {"device": f"{gpu.name} (cuda:{gpu.index})"}
    return plan, notes if placed is None else notes | _expert_notes(config, placed)


def vram_rows(
    config: EngineConfig,
    model: ModelInfo,
    needed: GpuBytes,
    placed: ExpertPlan,
    *,
    cache_tokens: int,
    expert_bytes: int,
) -> dict[str, int]:
    """Bytes of GPU memory by what takes them, with `placed` of experts of `expert_bytes` in all; as `plan_gpu`."""
    experts = expert_bytes * (int(placed.on_gpu.sum()) + placed.moves) // max(1, placed.on_gpu.size)
    return {
        "trunk": needed.weights - experts - placed.ring_bytes,
        "routed experts": experts,
        "streaming buffers": placed.ring_bytes,
        "KV cache": cache_tokens * _token_bytes(config, model),
        **gpu_rows(config, model, needed),
        "reserve": RESERVE_BYTES,
    }


def _expert_notes(config: EngineConfig, placed: ExpertPlan) -> dict[str, str]:
    layers, experts = placed.on_gpu.shape
    count = int(placed.on_gpu.sum())
    text = f"{count} of {placed.on_gpu.size}, {config.expert_placement}"
    asked = expert_count_asked(config, layers, experts)
    if asked is None:
        text += ", as many as fit"
    elif asked > count:
        text += f"; {asked} asked for, more do not fit or are not there"
    notes = {"gpu_experts": text}
    if config.expert_updates:
        together = count in (0, placed.on_gpu.size)
        why_not = "all are in one place" if together else "RAM has no room for another expert of each layer"
        moving = f"up to {placed.moves} at a time follow the routing"
        notes["expert_updates"] = moving if placed.moves else f"none move: {why_not}"
    if placed.max_deferred:
        notes["deferred_experts"] = f"up to {placed.max_deferred} of a token, in decode steps"
    return notes


def check_expert_memory(expert_bytes: int, available_bytes: int, rows: dict[str, int] | None = None) -> None:
    """Raises ConfigError when routed experts of `expert_bytes` do not fit the RAM beside `rows` (`host_rows`)."""
    parts = {"the routed experts": expert_bytes, **(rows or {}), "reserve": RESERVE_BYTES}
    if sum(parts.values()) > available_bytes:
        table = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        expected = f"{sum(parts.values()) / _GIB:.2f} GiB of RAM ({table})"
        raise MemoryShortageError("memory", expected, f"{available_bytes / _GIB:.2f} GiB available", "free memory")


def loading_bytes(placed: ExpertPlan, expert_bytes: int) -> int:
    """RAM taken only while loading: what is read ahead, and experts on their way to the GPU. `expert_bytes`: of all."""
    most = min(COPIED_TOGETHER, int(placed.on_gpu.sum(axis=1).max(initial=0)))
    return WINDOW_BYTES + expert_bytes * most // max(1, placed.on_gpu.size)


def with_ram(
    placed: ExpertPlan, expert_bytes: int, available_bytes: int, rows: dict[str, int] | None = None
) -> ExpertPlan:
    """`placed` with as many slots for experts that leave the GPU as RAM has; none move where it has none.

    `expert_bytes`: of all experts; `rows`: what else takes RAM (`host_rows`).

    Raises:
        ConfigError: the experts that are not on the GPU do not fit.
    """
    all_experts, layers = max(1, placed.on_gpu.size), max(1, placed.on_gpu.shape[0])
    in_ram = expert_bytes - expert_bytes * int(placed.on_gpu.sum()) // all_experts
    check_expert_memory(in_ram + loading_bytes(placed, expert_bytes), available_bytes, rows)
    if not placed.moves:
        return placed
    # At most half of what is left: others use the machine too.
    left = available_bytes - in_ram - RESERVE_BYTES - sum((rows or {}).values())
    slots = left // 2 // max(1, layers * expert_bytes // all_experts)
    return replace(placed, ram_slots=min(placed.ram_slots, slots), moves=placed.moves if slots else 0)
