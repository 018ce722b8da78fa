"""Requests in, tokens out, one step at a time. No process, socket or clock of its own: `proa.engine.loop` drives it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from proa.chat.grammar.matcher import Matcher
from proa.core.constraint import MAX_GRAMMAR_CHARACTERS, Constraint
from proa.engine.constraint import mask_words
from proa.engine.device_sampler import Drawable
from proa.engine.grammar_worker import GrammarWaiters, GrammarWorker
from proa.engine.hybrid_report import HybridReport
from proa.engine.prefill_pace import PrefillPace
from proa.engine.request import Request
from proa.engine.runner import PrefillPass, Runner
from proa.engine.sampler import Draw, draw
from proa.engine.scheduler import Chunk, Scheduler
from proa.engine.steps import Steps, noted
from proa.ipc.messages import EngineStats, Generate, PrefillProgress, StepOutput, TokenOutput
from proa.kvcache.manager import KVManager

if TYPE_CHECKING:  # it takes the extension, whose faults are reported by `run_engine`
    from proa.moe.usage import ExpertUsage

__all__ = ["Engine"]

logger = logging.getLogger("proa.engine")


class Engine:
    """Every request submitted ends with exactly one output that has a finish_reason."""

    def __init__(
        self,
        *,
        runner: Runner,
        manager: KVManager,
        scheduler: Scheduler,
        pace: PrefillPace,
        max_prompt_tokens: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        grammars: GrammarWorker | None = None,
        usage: ExpertUsage | None = None,
        random_seed: int | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`max_prompt_tokens`: of a pass. `grammars`: compiles constraints; None: those with a grammar are refused.

        `usage`: is told between steps.
        """
        self._runner = runner
        self._clock = clock
        self._manager = manager
        self._scheduler = scheduler
        self.usage = usage
        self._steps = Steps(runner, scheduler, pace, max_prompt_tokens=max_prompt_tokens, clock=clock, fail=self._fail)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_model_len = max_model_len
        self._seeds = random.SystemRandom() if random_seed is None else random.Random(random_seed)
        self._compiling = GrammarWaiters(grammars)
        self._mask = np.zeros(mask_words(vocab_size), dtype=np.int32)
        self._requests: dict[str, Request] = {}
        # Outputs nobody has taken yet.
        self._outbox: list[TokenOutput] = []
        self._arrivals = 0
        self._generated = 0
        self._aborted = 0
        self._hybrid = HybridReport(lambda: runner.hybrid_traffic, clock)
        self._step_ms = self._sample_ms = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._outbox)

    @property
    def pace(self) -> PrefillPace:
        """How prompts and answers take turns."""
        return self._steps.pace

    @property
    def running_pass(self) -> PrefillPass | None:
        """Prompts that stand between two layers; of two passes that do, the one that goes on first."""
        return self._steps.running_pass

    @property
    def is_compiling(self) -> bool:
        """Whether sequences wait for their grammar; `admit` takes those in whose is there."""
        return bool(self._compiling)

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` would return any."""
        return bool(self._outbox or self._steps.progress)

    def submit(self, message: Generate) -> None:
        """Queue a sequence. One that cannot run is answered with an error in the next step."""
        if message.rid in self._requests or message.rid in self._compiling:
            # Answering would end the other request of this name at the client.
            logger.error("dropped a request: rid %r is in use", message.rid)
            return
        if problem := self._refuse(message):
            self._outbox.append(TokenOutput(rid=message.rid, token_ids=[], finish_reason="error", error=problem))
            return
        if message.sampling.max_tokens < 1:
            self._outbox.append(TokenOutput(rid=message.rid, token_ids=[], finish_reason="length"))
            return
        if message.constraint is not None and message.constraint.grammar:
            self._compiling.add(message)
            self.admit()
            return
        self._add(message, None)

    def admit(self) -> None:
        """Queue the sequences whose grammar is there by now; those whose grammar has a fault end."""
        for message, matcher in self._compiling.take_ready():
            if isinstance(matcher, BaseException):
                text = f"{type(matcher).__name__}: {matcher}"
                self._outbox.append(TokenOutput(rid=message.rid, token_ids=[], finish_reason="error", error=text))
            else:
                self._add(message, matcher)

    def _add(self, message: Generate, matcher: Matcher | None) -> None:
        request = Request(
            message,
            arrival=self._arrivals,
            seed=self._seeds.getrandbits(64),
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            matcher=matcher,
        )
        self._arrivals += 1
        self._requests[request.rid] = request
        self._scheduler.add(request)

    def abort(self, rid: str) -> None:
        """Stop `rid`, or everything when empty; its blocks are free on return. Unknown ones are finished already."""
        for name in [*self._requests, *self._compiling] if rid == "" else [rid]:
            if self._compiling.remove(name):
                self._aborted += 1
                self._outbox.append(TokenOutput(rid=name, token_ids=[], finish_reason="abort"))
                continue
            request = self._requests.get(name)
            if request is not None:
                self._aborted += 1
                self._outbox.append(self._end(request, TokenOutput(rid=name, token_ids=[], finish_reason="abort")))

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests are unfinished."""
        if self._requests or self._compiling:
            return False
        self._manager.flush()
        return True

    def record_experts(self, action: Literal["start", "stop", "dump"]) -> list[list[int]] | None:
        """Records which experts tokens go to from "start" to "stop"; "dump": tokens by MoE layer and expert since.

        None where nothing is dumped.
        """
        if self.usage is None:
            return None
        if action == "start":
            self.usage.start_recording()
        elif action == "stop":
            self.usage.stop_recording()
        else:
            recorded = self.usage.dump()
            return None if recorded is None else [[int(count) for count in row] for row in recorded.counts]
        return None

    def step(self, poll: Callable[[], None] | None = None) -> StepOutput:
        """Compute prompts as far as running answers let them, or a decode step; draw tokens.

        What was queued since the last step comes with it. `poll` is called between layers and may submit, abort,
        flush and take outputs: an aborted sequence leaves the forward there.
        """
        started = self._clock()
        self.admit()
        computed = self._steps.compute(poll)
        forwarded = self._clock()
        for chunk, logits in computed:
            if chunk.live:  # not aborted while others were computed again
                self._advance(chunk, logits)
        if self.usage is not None and self.running_pass is None and computed:
            # Not between the layers of a pass, which has planned with every expert where it is.
            self.usage.after_step(sum(chunk.count for chunk, _ in computed))
        ended = self._clock()
        self._sample_ms = (ended - forwarded) * 1e3
        self._step_ms = (ended - started) * 1e3
        return self.take_outputs()

    def take_outputs(self) -> StepOutput:
        """What was queued and not taken yet."""
        outputs, self._outbox = self._outbox, []
        progress, self._steps.progress = self._steps.progress, []
        return StepOutput(outputs, self.stats(), progress)

    def stats(self) -> EngineStats:
        """Totals since start; step, schedule and sample times are of the last step."""
        block_size = self._manager.block_size
        experts, running = self._runner.expert_traffic, self.running_pass
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_queued=len(self._scheduler.waiting) + len(self._compiling),
            kv_tokens_used=self._manager.num_used * block_size,
            kv_tokens_total=self._manager.num_blocks * block_size,
            prefix_hit_tokens=self._scheduler.num_hit_tokens,
            prompt_tokens=self._scheduler.num_prompt_tokens,
            generation_tokens=self._generated,
            aborted=self._aborted,
            out_of_memory=self._steps.out_of_memory,
            prefill_tokens=0 if running is None else running.num_tokens,
            prefill_share=0.0 if running is None else running.share_done,
            step_ms=self._step_ms,
            schedule_ms=self._steps.schedule_ms,
            sample_ms=self._sample_ms,
            expert_bytes_read=experts.bytes_read,
            expert_ms=experts.seconds * 1e3,
            moved_experts=0 if self.usage is None else self.usage.num_moved,
            deferred_experts=0 if self.usage is None else self.usage.num_deferred,
            **self._hybrid.fields(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when KV blocks are lost or owned twice. O(KV blocks): for when nothing runs."""
        self._manager.check_integrity()
        if not self._requests:
            assert self._manager.num_used == 0, f"{self._manager.num_used} KV blocks in use by nobody"

    def _refuse(self, message: Generate) -> str | None:
        """Why `message` cannot run. The API checks all of this; wrong ids must never reach the embedding table."""
        ids = message.token_ids
        if not ids:
            return "[token_ids] expected at least one prompt token, got none."
        if len(ids) >= self._max_model_len:
            return f"[token_ids] expected fewer than {self._max_model_len} prompt tokens, got {len(ids)}."
        for name, values in (("token_ids", ids), ("logit_bias", message.sampling.logit_bias)):
            if values and not 0 <= min(values) <= max(values) < self._vocab_size:
                return (
                    f"[{name}] expected token ids in 0 .. {self._vocab_size - 1}, got {min(values)} .. {max(values)}."
                )
        return _refuse_constraint(message.constraint, self._vocab_size)

    def _advance(self, chunk: Chunk, logits: Drawable | None) -> None:
        """Book a computed chunk, draw the next token and queue the output."""
        request = chunk.request
        request.num_computed = chunk.start + chunk.count
        if logits is not None:
            try:
                drawn = logits if isinstance(logits, Draw) else self._draw(request, logits)
                self._append(request, drawn)
            except Exception as error:  # noqa: BLE001
                # LogitsError, GrammarError, or parameters nobody should have let through: the other sequences go on.
                self._fail(chunk, noted(error, [chunk]).text)
                return
        else:
            self._steps.progress.append(PrefillProgress(request.rid, request.num_computed))
        if chunk.start < request.prompt_len and request.table is not None:
            # At every chunk, so that requests waiting for this prefix can start.
            self._manager.commit(request.table, request.tokens, request.num_computed)

    def _draw(self, request: Request, logits: NDArray[np.float32]) -> Draw:
        is_masked = request.constraint is not None and request.constraint.fill(self._mask)
        return draw(
            logits,
            request.params,
            request.adjuster,
            seed=request.seed,
            position=len(request.tokens),
            index=request.num_generated,
            mask=self._mask if is_masked else None,
        )

    def _append(self, request: Request, drawn: Draw) -> None:
        reason = request.append(drawn.token, max_model_len=self._max_model_len)
        self._generated += 1
        output = TokenOutput(
            rid=request.rid,
            token_ids=[drawn.token],
            logprobs=None if drawn.logprob is None else [drawn.logprob],
            finish_reason=reason,
            matched_stop=drawn.token if reason == "stop" and drawn.token in request.end_ids else None,
            cached_tokens=request.cached_tokens or 0,
        )
        self._outbox.append(output if reason is None else self._end(request, output))

    def _fail(self, chunk: Chunk, reason: str) -> None:
        request = chunk.request
        logger.error("request %s failed at token %d: %s", request.rid, chunk.start, reason)
        output = TokenOutput(rid=request.rid, token_ids=[], finish_reason="error", error=reason)
        self._outbox.append(self._end(request, output, keep_prefix=False))

    def _end(self, request: Request, output: TokenOutput, *, keep_prefix: bool = True) -> TokenOutput:
        del self._requests[request.rid]
        self._scheduler.remove(request, keep_prefix=keep_prefix)
        return output


def _refuse_constraint(constraint: Constraint | None, vocab_size: int) -> str | None:
    if constraint is None:
        return None
    if len(constraint.grammar) > MAX_GRAMMAR_CHARACTERS:
        return f"[grammar] expected at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(constraint.grammar)}."
    ids = [*constraint.starts, *chain(*constraint.starts.values()), *constraint.pauses, *constraint.banned]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        return f"[constraint] expected token ids in 0 .. {vocab_size - 1}, got {min(ids)} .. {max(ids)}."
    return None
