"""How many prompt tokens a pass has on a GPU, and what goes where for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from proa.core.errors import ConfigError
from proa.device.select import Gpu
from proa.engine.build import max_forward_tokens
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import with_experts
from proa.engine.gpu_plan import buffer_share, fit_experts, plan_gpu, with_ram
from proa.engine.kv_plan import KVPlan
from proa.engine.working_memory import host_rows
from proa.models import ExpertPlan, GpuBytes, ModelInfo

__all__ = ["PassPlan", "solve_pass"]

# A pass has all experts that stream cross the bus once, whatever its tokens.
STREAMED_TOKENS = (32768, 16384, 8192, 4096, 2048)
# With experts that stay where they are more tokens gain nothing.
RESIDENT_TOKENS = (4096, 2048, 1024, 512)
# Of what the trunk leaves, scratch and the ring take at most this part: the rest is for KV cache and experts.
BUFFER_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PassPlan:
    """`config`: with the tokens of a pass, and without streaming where there is no room for it."""

    config: EngineConfig
    placed: ExpertPlan
    kv: KVPlan
    notes: dict[str, str]


def solve_pass(
    config: EngineConfig,
    gpu: Gpu,
    model: ModelInfo,
    trunk_for: Callable[[int], GpuBytes],
    *,
    expert_bytes: int,
    ram_bytes: int,
) -> PassPlan:
    """The largest pass whose buffers fit; with a number of tokens in `config`, that one.

    `trunk_for`: what a trunk takes with forwards of so many tokens. `expert_bytes`: of all experts.

    Raises:
        ConfigError: nothing fits, or not what was asked for.
    """
    refusal: ConfigError | None = None
    for candidate in _candidates(config, model):
        trunk = trunk_for(max_forward_tokens(candidate))
        try:
            plan = _plan(candidate, gpu, model, trunk, expert_bytes=expert_bytes, ram_bytes=ram_bytes)
        except ConfigError as error:
            # What the smallest one lacks is what is lacking.
            refusal = error
            continue
        if config.chunked_prefill_size is not None or _is_reasonable(plan, gpu, model, trunk, expert_bytes):
            return plan
    assert refusal is not None, "the smallest pass is reasonable or does not fit"
    raise refusal


def _candidates(config: EngineConfig, model: ModelInfo) -> Iterator[EngineConfig]:
    """Streamed passes from the largest that the context can fill, then those without streaming."""
    context = config.context_length or model.max_position_embeddings
    for threshold in (config.gpu_prefill_threshold, *((0,) if config.gpu_prefill_threshold is None else ())):
        streams = threshold != 0
        sizes = STREAMED_TOKENS if streams else RESIDENT_TOKENS
        useful = [size for size in sizes if size < 2 * context] or [sizes[-1]]
        for size in useful if config.chunked_prefill_size is None else (config.chunked_prefill_size,):
            yield msgspec.structs.replace(config, chunked_prefill_size=size, gpu_prefill_threshold=threshold)


def _plan(
    config: EngineConfig, gpu: Gpu, model: ModelInfo, trunk: GpuBytes, *, expert_bytes: int, ram_bytes: int
) -> PassPlan:
    max_tokens = max_forward_tokens(config)
    placed = fit_experts(config, gpu, model, trunk, expert_bytes=expert_bytes, max_tokens=max_tokens)
    placed = with_ram(placed, expert_bytes, ram_bytes, host_rows(config, model.experts, placed, max_tokens))
    needed = with_experts(trunk, placed, model.experts, all_bytes=expert_bytes, max_tokens=max_tokens)
    kv, notes = plan_gpu(config, gpu, model, needed, placed, expert_bytes=expert_bytes)
    kind = "experts where they are"
    if placed.stream_from is not None:
        kind = "all experts stream" if placed.stream_all else "experts stream where that is faster"
        kind += f", from {placed.stream_from} tokens on"
    notes["prompts"] = f"up to {config.chunked_prefill_size} tokens in a pass; {kind}"
    return PassPlan(config, placed, kv, notes)


def _is_reasonable(plan: PassPlan, gpu: Gpu, model: ModelInfo, trunk: GpuBytes, expert_bytes: int) -> bool:
    tokens = plan.config.chunked_prefill_size
    assert tokens is not None
    smallest = plan.config.gpu_prefill_threshold == 0 and tokens == RESIDENT_TOKENS[-1]
    if plan.placed.stream_from is None and tokens > RESIDENT_TOKENS[0]:
        return False
    needed = with_experts(
        trunk, plan.placed, model.experts, all_bytes=expert_bytes, max_tokens=max_forward_tokens(plan.config)
    )
    share = buffer_share(plan.config, gpu, model, needed, plan.placed, trunk)
    return smallest or share <= BUFFER_SHARE
