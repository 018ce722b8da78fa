"""What goes where, and the settings that were left open: solved together before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from proa.core.errors import MemoryShortageError
from proa.device.select import Gpu
from proa.engine.build import max_forward_tokens
from proa.engine.config import CPU_PASS_TOKENS, EngineConfig
from proa.engine.expert_placement import with_experts
from proa.engine.gpu_plan import buffer_share, fit_experts, loading_bytes, plan_gpu, vram_rows, with_ram
from proa.engine.kv_plan import RESERVE_BYTES, KVPlan, cache_dtype, plan_kv
from proa.engine.working_memory import CPU_PROCESS_BYTES, host_rows, running_bytes
from proa.kvcache.pool import kv_bytes_per_token
from proa.models import ExpertPlan, GpuBytes, ModelInfo, ModelNeeds

__all__ = ["EnginePlan", "NoRoomError", "largest", "solve", "table_of"]

_GIB = 2**30
# A pass has all experts that stream cross the bus once, whatever its tokens.
STREAMED_TOKENS = (32768, 16384, 8192, 4096, 2048)
# With experts that stay where they are more tokens gain nothing.
RESIDENT_TOKENS = (4096, 2048, 1024, 512)
# Of what the trunk leaves, scratch and the ring take at most this part: the rest is for KV cache and experts.
BUFFER_SHARE = 0.5
# Of the KV cache each of several requests is to have so many tokens, or its whole context.
FAIR_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """`config`: with the sequences and the prompt tokens of a forward that were solved, and without streaming where
    there is no room for it. `placed`: None with everything on the CPU. `ram`, `vram`: bytes by what takes them.
    running_bytes: what torch takes of the GPU while a step runs, beside its libraries.
    """

    config: EngineConfig
    kv: KVPlan
    placed: ExpertPlan | None
    ram: dict[str, int]
    vram: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    running_bytes: int = 0


class NoRoomError(MemoryShortageError):
    """The shortage `error`, and by rows what would be needed with `config`."""

    def __init__(
        self, error: MemoryShortageError, config: EngineConfig, ram: dict[str, int], vram: dict[str, int]
    ) -> None:
        Exception.__init__(self, str(error))
        self.where = error.where
        self.config, self.ram, self.vram = config, ram, vram


def solve(config: EngineConfig, needs: ModelNeeds, gpu: Gpu | None, ram_bytes: int) -> EnginePlan:
    """The best plan for `gpu`, None: for the CPU alone, and `ram_bytes` of RAM.

    With an open number of sequences there are as many as decode steps are captured for, as long as each can have
    FAIR_TOKENS of the cache.

    Raises:
        NoRoomError: nothing fits, or not what was asked for. ConfigError: settings that the model does not have.
    """
    solve_for = partial(_on_cpu if gpu is None else partial(_on_gpu, gpu=gpu), needs=needs, ram_bytes=ram_bytes)
    if config.max_running_requests is not None:
        return _with_share(solve_for(config))

    def with_requests(requests: int) -> EngineConfig:
        return msgspec.structs.replace(config, max_running_requests=requests)

    def have_room(requests: int) -> bool:
        try:
            kv = solve_for(with_requests(requests)).kv
        except MemoryShortageError:
            return False
        return requests * min(kv.max_model_len, FAIR_TOKENS) <= kv.num_tokens

    requests = largest(1, config.cuda_graph_max_bs, have_room) or 1
    return _with_share(solve_for(with_requests(requests)))


def _with_share(plan: EnginePlan) -> EnginePlan:
    requests = plan.config.requests
    share = plan.kv.num_tokens // requests
    return replace(
        plan, notes={"max_running_requests": f"{requests}, with {share} tokens of the KV cache for each"} | plan.notes
    )


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in `[low, high]` that `fits`, which holds up to some number; None where it holds for none."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def table_of(rows: dict[str, int], available_bytes: int) -> str:
    """Rows of GiB in one line."""
    table = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in rows.items() if size)
    return f"{table} of {available_bytes / _GIB:.2f} GiB free"


def _on_cpu(config: EngineConfig, *, needs: ModelNeeds, ram_bytes: int) -> EnginePlan:
    config = msgspec.structs.replace(config, chunked_prefill_size=config.chunked_prefill_size or CPU_PASS_TOKENS)
    scratch = needs.cpu_scratch(max_forward_tokens(config), config.num_threads)
    token_bytes = kv_bytes_per_token(needs.info.layout, cache_dtype(config))

    def rows(tokens: int) -> dict[str, int]:
        return {
            "trunk": needs.trunk_bytes,
            "routed experts": needs.expert_bytes,
            "KV cache": tokens * token_bytes,
            "workspace": scratch,
            "process": CPU_PROCESS_BYTES,
            "reserve": RESERVE_BYTES - CPU_PROCESS_BYTES,
        }

    try:
        kv = plan_kv(
            config,
            needs.info.layout,
            model_context=needs.info.max_position_embeddings,
            weight_bytes=needs.packed_bytes + scratch,
            available_bytes=ram_bytes,
        )
    except MemoryShortageError as error:
        raise NoRoomError(error, config, rows(_tokens_asked(config)), {}) from error
    ram = rows(kv.num_tokens)
    return EnginePlan(config, kv, None, ram, notes=kv.notes | {"memory": table_of(ram, ram_bytes)})


def _on_gpu(config: EngineConfig, *, gpu: Gpu, needs: ModelNeeds, ram_bytes: int) -> EnginePlan:
    """The largest pass whose buffers fit and leave enough; with a number of tokens in `config`, that one."""
    refusal: NoRoomError | None = None
    tight: EnginePlan | None = None
    everything = _all_there(config, gpu, needs, ram_bytes)
    if everything is not None:
        return everything
    for candidate in _candidates(config, needs.info):
        trunk = needs.gpu_trunk(max_forward_tokens(candidate), config.context_length)
        try:
            plan = _with_pass(candidate, gpu, needs, trunk, ram_bytes)
        except NoRoomError as error:
            # What the smallest one lacks is what is lacking.
            refusal = error
            continue
        if tight is not None and not _streams(plan) and _streams(tight) and _holds_a_pass(tight, needs.info):
            break  # a few experts more are worth less than a bus that carries the others
        if config.chunked_prefill_size is not None or _is_reasonable(plan, gpu, needs, trunk):
            return plan
        tight = plan
    if tight is not None:
        return tight
    assert refusal is not None, "there is at least one candidate"
    raise refusal


def _streams(plan: EnginePlan) -> bool:
    return plan.placed is not None and plan.placed.stream_from is not None


def _holds_a_pass(plan: EnginePlan, model: ModelInfo) -> bool:
    """Whether the cache is as long as a pass, or as the longest sequence."""
    longest = plan.config.context_length or model.max_position_embeddings
    return plan.kv.num_tokens >= min(plan.config.pass_tokens, longest)


def _all_there(config: EngineConfig, gpu: Gpu, needs: ModelNeeds, ram_bytes: int) -> EnginePlan | None:
    """With every expert on the GPU, where they fit: no ring and no bus then."""
    for size in (config.chunked_prefill_size,) if config.chunked_prefill_size is not None else RESIDENT_TOKENS:
        candidate = msgspec.structs.replace(config, chunked_prefill_size=size, gpu_prefill_threshold=0)
        trunk = needs.gpu_trunk(max_forward_tokens(candidate), config.context_length)
        try:
            plan = _with_pass(candidate, gpu, needs, trunk, ram_bytes)
        except NoRoomError:
            continue
        assert plan.placed is not None
        is_told = config.chunked_prefill_size is not None
        if plan.placed.on_gpu.all() and (is_told or _is_reasonable(plan, gpu, needs, trunk)):
            return plan
    return None


def _candidates(config: EngineConfig, model: ModelInfo) -> Iterator[EngineConfig]:
    """Streamed passes from the largest that the context can fill, then those without streaming."""
    context = config.context_length or model.max_position_embeddings
    for threshold in (config.gpu_prefill_threshold, *((0,) if config.gpu_prefill_threshold is None else ())):
        streams = threshold != 0
        sizes = STREAMED_TOKENS if streams else RESIDENT_TOKENS
        useful = [size for size in sizes if size < 2 * context] or [sizes[-1]]
        for size in useful if config.chunked_prefill_size is None else (config.chunked_prefill_size,):
            yield msgspec.structs.replace(config, chunked_prefill_size=size, gpu_prefill_threshold=threshold)


def _with_pass(config: EngineConfig, gpu: Gpu, needs: ModelNeeds, trunk: GpuBytes, ram_bytes: int) -> EnginePlan:
    info, expert_bytes, max_tokens = needs.info, needs.expert_bytes, max_forward_tokens(config)
    placed = fit_experts(config, gpu, info, trunk, expert_bytes=expert_bytes, max_tokens=max_tokens)
    beside = host_rows(config, info.experts, placed, max_tokens)

    def ram_rows(placed: ExpertPlan) -> dict[str, int]:
        on_gpu = int(placed.on_gpu.sum())
        return {
            "routed experts": expert_bytes - expert_bytes * on_gpu // max(1, placed.on_gpu.size),
            "loading": loading_bytes(placed, expert_bytes),
            **beside,
            "reserve": RESERVE_BYTES,
        }

    try:
        placed = with_ram(placed, expert_bytes, ram_bytes, beside)
        needed = with_experts(trunk, placed, info.experts, all_bytes=expert_bytes, max_tokens=max_tokens)
        kv, notes = plan_gpu(config, gpu, info, needed, placed)
    except MemoryShortageError as error:
        needed = with_experts(trunk, placed, info.experts, all_bytes=expert_bytes, max_tokens=max_tokens)
        asked = _tokens_asked(config)
        vram = vram_rows(config, info, needed, placed, cache_tokens=asked, expert_bytes=expert_bytes)
        raise NoRoomError(error, config, ram_rows(placed), vram) from error
    # Sequences are no longer than this; what that leaves is nobody's.
    transient = needs.gpu_trunk(max_tokens, kv.max_model_len).transient
    needed = replace(needed, transient=min(needed.transient, transient))
    ram = ram_rows(placed)
    vram = vram_rows(config, info, needed, placed, cache_tokens=kv.num_tokens, expert_bytes=expert_bytes)
    notes |= {"gpu_memory": table_of(vram, gpu.free_bytes), "memory": table_of(ram, ram_bytes)}
    notes["prompts"] = f"up to {config.pass_tokens} tokens in a pass; {_how_prompts_run(placed)}"
    return EnginePlan(config, kv, placed, ram, vram, kv.notes | notes, running_bytes(config, info, needed))


def _how_prompts_run(placed: ExpertPlan) -> str:
    if placed.stream_from is None:
        return "experts where they are"
    kind = "all experts stream" if placed.stream_all else "experts stream where that is faster"
    return f"{kind}, from {placed.stream_from} tokens on"


def _tokens_asked(config: EngineConfig) -> int:
    """Of the cache, the least there is any use for."""
    return config.max_total_tokens or config.context_length or 0


def _is_reasonable(plan: EnginePlan, gpu: Gpu, needs: ModelNeeds, trunk: GpuBytes) -> bool:
    tokens, placed = plan.config.pass_tokens, plan.placed
    assert placed is not None
    smallest = plan.config.gpu_prefill_threshold == 0 and tokens == RESIDENT_TOKENS[-1]
    if placed.stream_from is None and tokens > RESIDENT_TOKENS[0]:
        return False
    max_tokens = max_forward_tokens(plan.config)
    needed = with_experts(trunk, placed, needs.info.experts, all_bytes=needs.expert_bytes, max_tokens=max_tokens)
    return smallest or buffer_share(plan.config, gpu, needs.info, needed, placed, trunk) <= BUFFER_SHARE
