"""One request in flight: its sequences, their assemblers and the usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa.chat.dialect import AnswerReading
from proa.core.constraint import Constraint
from proa.core.errors import UnavailableError
from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import Generate
from proa.server.assembler import ChoiceAssembler, Delta
from proa.server.engine_client import EngineClient
from proa.server.metrics import Metrics
from proa.server.progress import PromptProgress
from proa.server.reading_assembler import ReadingAssembler

__all__ = ["Assembler", "EngineFailedError", "Generation", "GenerationPlan", "Usage", "new_id"]


# Both take the outputs of one choice and tell what is new in it.
Assembler = ChoiceAssembler | ReadingAssembler


class EngineFailedError(UnavailableError):
    """The engine ended, or gave up on this request, while it was running."""

    def __init__(self, reason: str) -> None:
        super().__init__("engine", "an answer", reason or "an engine error", "retry")


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A validated request. Choice index = prompt * n + i, as in OpenAI's completions."""

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    n: int = 1
    skip_special_tokens: bool = True
    include_stop: bool = False
    reading: AnswerReading | None = None
    constraint: Constraint | None = None
    names: frozenset[str] = frozenset()


@dataclass(slots=True)
class Usage:
    """Token counts so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The OpenAI `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            # Where Moonshot's and SGLang's clients look for them.
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": self.reasoning_tokens,
        }


@dataclass(slots=True)
class _Timing:
    started: float = field(default_factory=time.monotonic)
    last: dict[int, float] = field(default_factory=dict)


class Generation:
    """Iterates over the deltas of all choices until every one has finished."""

    def __init__(
        self, plan: GenerationPlan, client: EngineClient, assemblers: Sequence[Assembler], metrics: Metrics
    ) -> None:
        self.plan = plan
        self._metrics = metrics
        self._timing = _Timing()
        self._assemblers: dict[str, Assembler] = {}
        requests = []
        for prompt, token_ids in enumerate(plan.prompts):
            for choice in range(plan.n):
                rid = f"{plan.id}/{prompt}.{choice}"
                self._assemblers[rid] = assemblers[prompt * plan.n + choice]
                sampling = _seeded(plan.sampling[prompt], choice)
                requests.append(Generate(rid=rid, token_ids=token_ids, sampling=sampling, constraint=plan.constraint))
        self._stream = client.submit(requests, names=plan.names | {plan.id})
        metrics.request_started()

    @property
    def usage(self) -> Usage:
        """Counts so far. Cached tokens: those that even the first of the choices did not have to compute."""
        assemblers = list(self._assemblers.values())
        n = self.plan.n
        cached = sum(
            min(assembler.cached_tokens for assembler in assemblers[start : start + n])
            for start in range(0, len(assemblers), n)
        )
        return Usage(
            prompt_tokens=sum(len(token_ids) for token_ids in self.plan.prompts),
            completion_tokens=sum(assembler.num_tokens for assembler in assemblers),
            cached_tokens=cached,
            reasoning_tokens=sum(assembler.reasoning_tokens for assembler in assemblers),
        )

    @property
    def progress(self) -> PromptProgress:
        """How far the prompts have come."""
        return self._stream.progress

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes.

        Raises:
            EngineFailedError: the engine is gone or gave up.
        """
        stream = self._stream
        try:
            while not all(assembler.is_finished for assembler in self._assemblers.values()):
                for output in await stream.next():
                    assembler = self._assemblers[output.rid]
                    if assembler.is_finished:
                        continue
                    self._observe(assembler.index, len(output.token_ids))
                    delta = assembler.push(output)
                    if delta.finish_reason == "error":
                        raise EngineFailedError(delta.error)
                    if delta.finish_reason is not None and output.finish_reason is None:
                        stream.abort(output.rid)
                    if not delta.is_empty:
                        yield delta
        finally:
            self.close()
        self._metrics.request_finished(time.monotonic() - self._timing.started)

    def close(self) -> None:
        """Abort what still runs. Needed when `deltas` was never iterated to its end."""
        self._stream.close()

    def _observe(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        if num_tokens:
            last = self._timing.last.get(index)
            if last is None:
                self._metrics.first_token(now - self._timing.started)
            else:
                self._metrics.next_tokens(now - last, num_tokens)
            self._timing.last[index] = now


def _seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The n choices of a seeded request differ from each other, reproducibly."""
    if sampling.seed is None or choice == 0:
        return sampling
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    # Within a signed 64-bit integer, like the seed itself.
    values["seed"] = (sampling.seed + choice + 2**63) % 2**64 - 2**63
    return SamplingParams(**values)


def new_id(prefix: str) -> str:
    """An unguessable response id: /abort_request takes it."""
    return f"{prefix}{secrets.token_hex(16)}"
