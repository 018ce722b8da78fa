"""The parts of an engine, put together around a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from proa.chat.grammar.matcher import Vocabulary
from proa.engine.config import EngineConfig
from proa.engine.engine import Engine
from proa.engine.grammar_worker import GrammarWorker
from proa.engine.kv_plan import KVPlan
from proa.engine.prefill_pace import PrefillPace
from proa.engine.runner import ForwardModel, Runner, StepGraphs
from proa.engine.scheduler import Scheduler
from proa.kvcache.layout import KVLayout
from proa.kvcache.manager import KVManager
from proa.kvcache.pool import KVPool

if TYPE_CHECKING:  # it takes the extension, whose faults are reported by `run_engine`
    from proa.moe.usage import ExpertUsage

__all__ = ["LoadedModel", "Loader", "Report", "build_engine", "max_forward_tokens"]

_CPU = torch.device("cpu")

# bytes done, bytes in all
Report = Callable[[int, int], None]
# the pool, and the most blocks of a sequence
Capture = Callable[[KVPool, int], StepGraphs]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the plan of its KV cache, which lies on `device` as the trunk does.

    `capture`: records steps of the model over a pool; None where that is not possible or not wanted.
    load_vocabulary: for grammars; None: constrained requests are refused.
    usage: of the routed experts; None: nothing is counted. read_gb_s: measured bandwidth of the RAM; 0: not measured.
    config: with what was solved for it; None: as it was given. running_bytes: that torch takes of a GPU while a step
    runs.
    """

    model: ForwardModel
    layout: KVLayout
    plan: KVPlan
    eos_token_ids: Sequence[int]
    info: dict[str, str] = field(default_factory=dict)
    device: torch.device = _CPU
    capture: Capture | None = None
    load_vocabulary: Callable[[], Vocabulary] | None = None
    usage: ExpertUsage | None = None
    read_gb_s: float = 0.0
    config: EngineConfig | None = None
    running_bytes: int = 0


Loader = Callable[[EngineConfig, Report], LoadedModel]


def max_forward_tokens(config: EngineConfig) -> int:
    """The most tokens a step computes: those of a pass and a decoding token of every sequence."""
    return config.pass_tokens + config.requests


def build_engine(config: EngineConfig, loaded: LoadedModel, *, clock: Callable[[], float] = perf_counter) -> Engine:
    """Put the parts together; in RAM the KV cache takes address space now and memory when used.

    `clock`: seconds, by which prefill and decode take turns.
    """
    config, plan = loaded.config or config, loaded.plan
    pool = KVPool(loaded.layout, plan.num_blocks, plan.block_size, plan.dtype, loaded.device)
    manager = KVManager(plan.num_blocks, plan.block_size, prefix_cache=not config.disable_radix_cache)
    max_blocks = -(-plan.max_model_len // plan.block_size)
    runner = Runner(
        loaded.model,
        pool,
        max_tokens=max_forward_tokens(config),
        max_running=config.requests,
        max_blocks=max_blocks,
        graphs=None if loaded.capture is None else loaded.capture(pool, max_blocks),
        running_bytes=loaded.running_bytes,
    )
    if loaded.usage is not None:
        loaded.usage.reset()
    scheduler = Scheduler(manager, max_running=config.requests, max_prompts=config.prefill_max_requests)
    grammars = None if loaded.load_vocabulary is None else GrammarWorker(loaded.load_vocabulary)
    if grammars is not None:
        grammars.prepare()
    return Engine(
        runner=runner,
        manager=manager,
        scheduler=scheduler,
        pace=PrefillPace(None if config.max_decode_gap_ms is None else config.max_decode_gap_ms / 1e3),
        max_prompt_tokens=config.pass_tokens,
        vocab_size=loaded.model.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=plan.max_model_len,
        grammars=grammars,
        usage=loaded.usage,
        random_seed=config.random_seed,
        clock=clock,
    )
