"""What goes where on a machine, by the plan that the engine itself makes before it loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import cache_dtype
from proa.engine.solve import EnginePlan, NoRoomError, solve
from proa.kvcache.pool import KVDtype, kv_bytes_per_token
from proa.plan.hardware import Machine
from proa.plan.model_sizes import ModelSizes

__all__ = ["MemoryPlan", "Wanted", "plan_memory", "whole_requests"]

DEFAULT_CONTEXT = 32768
MAX_CONCURRENCY = 1024
_WHOLE_BLOCKS = 128  # tokens that are whole blocks of the cache, on a GPU and on a CPU


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

    def config_for(self, limit: int) -> EngineConfig:
        """What an engine is told to serve this with a model of so many positions.

        Raises:
            ConfigError: the model cannot have so many.
        """
        context = min(limit, DEFAULT_CONTEXT) if self.context is None else self.context
        if context > limit:
            raise ConfigError("--context", f"at most {limit}, the model's limit", context)
        return EngineConfig(
            model_path="",
            to_engine="",
            from_engine="",
            context_length=context,
            max_running_requests=self.concurrency,
            max_total_tokens=whole_requests(self.concurrency, context),
            kv_cache_dtype=self.kv_dtype,
            device="auto" if self.use_gpu else "cpu",
        )


def whole_requests(requests: int, context: int) -> int:
    """Tokens of the blocks that so many requests of `context` tokens fill together."""
    return requests * -(-context // _WHOLE_BLOCKS) * _WHOLE_BLOCKS


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`ram`, `vram`: bytes by what takes them. `refusal`: why the engine would not start, "" when it would.

    config: the engine's, with what was solved. chunk: prompt tokens of a forward. streams: whether long prompts have
    experts cross the bus. gpu_experts: of all layers together. kv_token_bytes: over all layers.
    """

    config: EngineConfig
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

    @property
    def flags(self) -> list[str]:
        """Of `proa serve`, for what is planned here; what is left out it solves as it was solved here."""
        pairs = {
            "--context-length": self.context,
            "--max-running-requests": self.concurrency,
            "--max-total-tokens": self.config.max_total_tokens,
            "--kv-cache-dtype": self.kv_dtype,
            "--device": "cuda" if self.uses_gpu else "cpu",
        }
        return [text for flag, value in pairs.items() if value is not None for text in (flag, str(value))]


def plan_memory(sizes: ModelSizes, machine: Machine, wanted: Wanted | EngineConfig) -> MemoryPlan:
    """How the model is served on `machine`; where it does not fit, what is missing stands in `refusal`.

    Raises:
        ConfigError: the model has no such context, or other settings are not for it.
    """
    config = wanted if isinstance(wanted, EngineConfig) else wanted.config_for(sizes.info.max_position_embeddings)
    gpu = None if config.device == "cpu" else machine.gpu
    dtype = cache_dtype(config, "float32" if gpu is None or sizes.info.has_float32_trunk else "bfloat16")
    found: EnginePlan | NoRoomError
    try:
        found = solve(config, sizes, gpu, machine.ram_bytes)
    except NoRoomError as error:
        found = error
    placed = found.placed if isinstance(found, EnginePlan) else None
    context = found.kv.max_model_len if isinstance(found, EnginePlan) else config.context_length
    return MemoryPlan(
        config=found.config,
        context=context or sizes.info.max_position_embeddings,
        concurrency=found.config.requests,
        kv_dtype=dtype,
        kv_token_bytes=kv_bytes_per_token(sizes.info.layout, dtype),
        chunk=found.config.pass_tokens,
        ram=found.ram,
        vram=found.vram,
        gpu_experts=0 if placed is None else int(placed.on_gpu.sum()),
        streams=placed is not None and placed.stream_from is not None,
        refusal=str(found) if isinstance(found, NoRoomError) else "",
    )
