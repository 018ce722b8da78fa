"""What goes where on a machine, by the plans that the engine itself makes before it loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from proa.core.errors import ConfigError
from proa.device.select import Gpu
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import place_experts, with_experts
from proa.engine.gpu_plan import KV_FRACTION, loading_bytes, plan_gpu, with_ram
from proa.engine.kv_plan import RESERVE_BYTES, plan_kv
from proa.engine.working_memory import CPU_PROCESS_BYTES, gpu_rows, host_rows
from proa.kvcache.pool import KVDtype, kv_bytes_per_token
from proa.plan.hardware import Machine
from proa.plan.model_sizes import ModelSizes

__all__ = ["MemoryPlan", "Wanted", "largest", "plan_memory"]

DEFAULT_CONTEXT = 32768
MAX_CONCURRENCY = 1024
# Prompt tokens of a forward: experts in one pass over the bus want many, experts on the CPU few.
STREAMED_CHUNKS = (32768, 16384, 8192, 4096)
CPU_CHUNK = 512
_WHOLE_BLOCKS = 128  # tokens that are whole blocks of the cache, on a GPU and on a CPU
# From so many tokens a pass over the bus is worth its time.
STREAM_FROM = 2048


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be served. `context`: tokens of each of `concurrency` requests; None: a default, or the model's limit.

    use_gpu: whether the trunk may lie on a GPU that is there.
    """

    context: int | None = None
    concurrency: int = 1
    kv_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    use_gpu: bool = True

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise ConfigError("--context", "at least 1 token", self.context)
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ConfigError("--concurrency", f"1 to {MAX_CONCURRENCY}", self.concurrency)

    def context_for(self, limit: int) -> int:
        """Tokens of a request to a model of so many positions. ConfigError: the model cannot have so many."""
        if self.context is None:
            return min(limit, DEFAULT_CONTEXT)
        if self.context > limit:
            raise ConfigError("--context", f"at most {limit}, the model's limit", self.context)
        return self.context


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`ram`, `vram`: bytes by what takes them. `refusal`: why the engine would not start, "" when it would.

    chunk: prompt tokens of a forward. streams: whether long prompts have the experts cross the bus.
    gpu_experts: of each layer. kv_token_bytes: over all layers.
    """

    context: int
    concurrency: int
    kv_dtype: KVDtype
    kv_token_bytes: int
    chunk: int
    ram: dict[str, int] = field(default_factory=dict)
    vram: dict[str, int] = field(default_factory=dict)
    gpu_experts: int = 0
    streams: bool = False
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def uses_gpu(self) -> bool:
        return bool(self.vram)

    def engine_config(self, model_path: str) -> EngineConfig:
        """What an engine is started with to do what is planned here."""
        wanted = Wanted(self.context, self.concurrency, self.kv_dtype, self.uses_gpu)
        return _config(
            wanted, self.context, self.chunk, gpu_experts=self.gpu_experts, streams=self.streams, model_path=model_path
        )

    @property
    def flags(self) -> list[str]:
        """Of `proa serve`, for what is planned here."""
        pairs = {
            "--context-length": self.context,
            "--max-running-requests": self.concurrency,
            "--max-total-tokens": _kv_tokens(self.context, self.concurrency),
            "--kv-cache-dtype": self.kv_dtype,
            "--chunked-prefill-size": self.chunk,
            "--device": "cuda" if self.uses_gpu else "cpu",
        }
        if self.gpu_experts:
            pairs["--gpu-experts"] = self.gpu_experts
        if self.uses_gpu and not self.streams:
            pairs["--gpu-prefill-threshold"] = 0
        return [text for flag, value in pairs.items() for text in (flag, str(value))]


def plan_memory(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> MemoryPlan:
    """How the model is served best on `machine`; where it does not fit, what is missing stands in `refusal`.

    A GPU gets the trunk and the KV cache, then the buffers for streaming, then as many experts as go in.

    Raises:
        ConfigError: the model has no such context.
    """
    context = wanted.context_for(sizes.info.max_position_embeddings)
    gpu = machine.gpu if wanted.use_gpu else None
    if gpu is None:
        return _on_cpu(sizes, machine, wanted, context)
    chunks = [chunk for chunk in STREAMED_CHUNKS if chunk < 2 * max(context, STREAM_FROM)]
    plans = (_on_gpu(sizes, machine, gpu, wanted, context, chunk) for chunk in (*chunks, None))
    refused: MemoryPlan | None = None
    for plan in plans:
        if plan.fits:
            return plan
        refused = plan
    assert refused is not None, "one plan is without streaming"
    return refused


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in `[low, high]` that `fits`, which holds up to some number; None where it holds for none."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _config(
    wanted: Wanted, context: int, chunk: int, *, gpu_experts: int = 0, streams: bool = False, model_path: str = ""
) -> EngineConfig:
    return EngineConfig(
        model_path=model_path,
        to_engine="",
        from_engine="",
        context_length=context,
        max_running_requests=wanted.concurrency,
        max_total_tokens=_kv_tokens(context, wanted.concurrency),
        kv_cache_dtype=wanted.kv_dtype,
        chunked_prefill_size=chunk,
        device="cuda" if wanted.use_gpu else "cpu",
        gpu_experts=gpu_experts,
        gpu_prefill_threshold=None if streams else 0,
    )


def _kv_tokens(context: int, concurrency: int) -> int:
    """Tokens of the blocks that the requests fill together."""
    return concurrency * -(-context // _WHOLE_BLOCKS) * _WHOLE_BLOCKS


def _on_cpu(sizes: ModelSizes, machine: Machine, wanted: Wanted, context: int) -> MemoryPlan:
    config = _config(wanted, context, CPU_CHUNK)
    dtype: KVDtype = "float32" if wanted.kv_dtype == "auto" else wanted.kv_dtype
    token_bytes = kv_bytes_per_token(sizes.info.layout, dtype)
    workspace = sizes.cpu_scratch_bytes(CPU_CHUNK + wanted.concurrency)
    refusal = ""
    try:
        plan_kv(
            config,
            sizes.info.layout,
            model_context=sizes.info.max_position_embeddings,
            weight_bytes=sizes.packed_bytes + workspace,
            available_bytes=machine.ram_bytes,
        )
    except ConfigError as error:
        refusal = str(error)
    ram = {
        "trunk": sizes.trunk_bytes,
        "routed experts": sizes.expert_bytes,
        "KV cache": _kv_tokens(context, wanted.concurrency) * token_bytes,
        "workspace": workspace,
        "process": CPU_PROCESS_BYTES,
        "reserve": RESERVE_BYTES - CPU_PROCESS_BYTES,
    }
    return MemoryPlan(context, wanted.concurrency, dtype, token_bytes, CPU_CHUNK, ram, refusal=refusal)


def _on_gpu(
    sizes: ModelSizes, machine: Machine, gpu: Gpu, wanted: Wanted, context: int, chunk: int | None
) -> MemoryPlan:
    """With prompts streamed in chunks of `chunk` tokens, None: computed on the CPU; and as many experts as go in."""

    def plan(gpu_experts: int) -> MemoryPlan:
        return _with_experts(sizes, machine, gpu, wanted, context, chunk, gpu_experts)

    def goes_in(gpu_experts: int) -> bool:
        rows = plan(gpu_experts).vram
        flexible = rows["routed experts"] + rows["KV cache"]
        # As the engine has it, which would take fewer than it is told.
        return flexible <= (gpu.free_bytes - sum(rows.values()) + flexible) * KV_FRACTION

    return plan(largest(0, sizes.info.experts.experts, goes_in) or 0)


def _with_experts(
    sizes: ModelSizes, machine: Machine, gpu: Gpu, wanted: Wanted, context: int, chunk: int | None, gpu_experts: int
) -> MemoryPlan:
    experts, tokens = sizes.info.experts, chunk or CPU_CHUNK
    # With every expert on the GPU nothing streams.
    streams = chunk is not None and gpu_experts < experts.experts
    config = _config(wanted, context, tokens, gpu_experts=gpu_experts, streams=streams)
    count = gpu_experts * experts.layers
    placed = place_experts(config, experts, count, all_bytes=sizes.expert_bytes, gpu_bytes=gpu.free_bytes)
    max_tokens = tokens + wanted.concurrency
    needed = with_experts(
        sizes.gpu_trunk(max_tokens), placed, experts, all_bytes=sizes.expert_bytes, max_tokens=max_tokens
    )
    on_gpu = sizes.expert_bytes * gpu_experts // experts.experts
    beside = host_rows(config, experts, placed, max_tokens)
    refusal = ""
    try:
        plan_gpu(config, gpu, sizes.info, needed)
        with_ram(placed, sizes.expert_bytes, machine.ram_bytes, beside)
    except ConfigError as error:
        refusal = str(error)
    auto: KVDtype = "float32" if sizes.info.has_float32_trunk else "bfloat16"
    dtype: KVDtype = auto if wanted.kv_dtype == "auto" else wanted.kv_dtype
    token_bytes = kv_bytes_per_token(sizes.info.layout, dtype)
    vram = {
        "trunk": sizes.gpu_trunk_bytes,
        "routed experts": on_gpu,
        "KV cache": _kv_tokens(context, wanted.concurrency) * token_bytes,
        "streaming buffers": placed.ring_bytes,
        **gpu_rows(config, sizes.info, needed),
        "reserve": RESERVE_BYTES,
    }
    ram = {
        "routed experts": sizes.expert_bytes - on_gpu,
        "loading": loading_bytes(placed, sizes.expert_bytes),
        **beside,
        "reserve": RESERVE_BYTES,
    }
    return MemoryPlan(context, wanted.concurrency, dtype, token_bytes, tokens, ram, vram, gpu_experts, streams, refusal)
