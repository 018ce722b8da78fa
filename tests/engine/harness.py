"""Drives an engine in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fake_model import LAYOUT, FakeModel

from proa.chat.grammar.matcher import Vocabulary
from proa.core.constraint import Constraint
from proa.core.sampling_params import SamplingParams
from proa.engine.build import LoadedModel, build_engine
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import KVPlan
from proa.ipc.messages import Generate, TokenLogprob

EOS = 2


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | None = None
    cached_tokens: int = 0
    error: str = ""


def fake_engine(
    *,
    num_blocks: int = 64,
    max_model_len: int = 512,
    load_vocabulary: Callable[[], Vocabulary] | None = None,
    model: FakeModel | None = None,
    clock: Callable[[], float] = perf_counter,
    **config: Any,
) -> Harness:
    """A small engine around the fake model."""
    settings = {"block_size": 4, "max_running_requests": 8, "chunked_prefill_size": 32, **config}
    engine_config = EngineConfig(model_path="", to_engine="", from_engine="", **settings)
    plan = KVPlan(
        num_blocks=num_blocks,
        block_size=engine_config.block_size,
        dtype="float32",
        max_model_len=min(max_model_len, num_blocks * engine_config.block_size),
        notes={},
    )
    loaded = LoadedModel(model or FakeModel(), LAYOUT, plan, (EOS,), load_vocabulary=load_vocabulary)
    return Harness(engine_config, loaded, clock)


class Harness:
    """An engine in this process and everything it answered, by rid."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, clock: Callable[[], float] = perf_counter) -> None:
        self.model: Any = loaded.model
        self.engine = build_engine(config, loaded, clock=clock)
        self.results: dict[str, Result] = {}
        self.progress: list[tuple[str, int]] = []

    def submit(self, rid: str, prompt: list[int], constraint: Constraint | None = None, **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        self.results[rid] = Result()
        self.engine.submit(Generate(rid=rid, token_ids=prompt, sampling=params, constraint=constraint))

    def step(self, poll: Callable[[], None] | None = None) -> None:
        step = self.engine.step(poll)
        self.progress += [(entry.rid, entry.tokens_done) for entry in step.progress]
        for output in step.outputs:
            result = self.results[output.rid]
            assert result.finish_reason is None, f"{output.rid} got an output after its end"
            result.tokens += output.token_ids
            result.logprobs += output.logprobs or []
            result.finish_reason = output.finish_reason
            result.matched_stop = output.matched_stop
            result.cached_tokens = output.cached_tokens
            result.error = output.error
        for queue in (self.engine._scheduler.running, self.engine._scheduler.waiting):
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(arrivals), "out of order: the wrong one would be preempted or wait"

    def run(self, *, max_steps: int = 5000) -> None:
        """Step until everything has ended, and check that no block is lost."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"unfinished after {max_steps} steps"
        assert all(result.finish_reason for result in self.results.values())
        self.engine.check_integrity()

    def generate(self, prompt: list[int], rid: str = "only", **sampling: Any) -> Result:
        self.submit(rid, prompt, **sampling)
        self.run()
        return self.results[rid]
