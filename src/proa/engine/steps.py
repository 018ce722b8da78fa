"""What is computed next: prompts layer by layer, or running answers between two; and what fails is tried again."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from proa.engine.device_sampler import Drawable
from proa.engine.prefill_pace import PrefillPace
from proa.engine.runner import MAX_SHORT_TOKENS, PrefillPass, Runner
from proa.engine.scheduler import Chunk, Scheduler
from proa.engine.step_failure import StepFailure
from proa.ipc.messages import PrefillProgress

__all__ = ["Computed", "Steps", "noted"]

logger = logging.getLogger("proa.engine")

# How often the layers of a pass are told as progress.
_PROGRESS_S = 0.5

# A chunk and what its token is drawn from, None unless it draws.
Computed = tuple[Chunk, Drawable | None]


class Steps:
    """One at a time, by `compute`. What it tells lies in `progress` until somebody takes it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        pace: PrefillPace,
        *,
        max_prompt_tokens: int,
        clock: Callable[[], float],
        fail: Callable[[Chunk, str], None],
    ) -> None:
        """`max_prompt_tokens`: of a pass. `fail`: ends the request of a chunk that cannot be computed, and why."""
        self._runner = runner
        self._scheduler = scheduler
        self.pace = pace
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = clock
        self._fail = fail
        # On their way: one, and between two layers of it another one.
        self._passes: list[PrefillPass] = []
        self._looked_at: tuple[int, int] | None = None  # of the scheduler, when short prompts were last looked for
        # Of a pass that failed: each is tried alone.
        self._suspects: list[Chunk] = []
        self._is_retry = False  # the pass is of one of them
        self._oldest_waits = False  # the pass is without the oldest prompt
        self.progress: list[PrefillProgress] = []
        self._told = 0.0  # when it last was
        self.out_of_memory = 0  # forwards that were
        self.schedule_ms = 0.0  # of the last step

    @property
    def running_pass(self) -> PrefillPass | None:
        """The one whose layers are next."""
        return self._passes[-1] if self._passes else None

    def compute(self, poll: Callable[[], None] | None) -> list[Computed]:
        """The chunks of a pass that has ended, or of a decode step if there is anything to decode.

        Sequences that are aborted meanwhile or that fail are left out. `poll` is called between layers.
        """
        self.schedule_ms = 0.0
        if not self._passes:
            chunks = self._scheduled(self._next_prompts)
            count = sum(chunk.count for chunk in chunks)
            if chunks and self.pace.is_short(count):
                return self._prompts_and_answers(chunks, poll)
            if chunks:
                self._passes.append(self._runner.begin(chunks, poll))
                self._passes[-1].is_retry, self._told, self._looked_at = self._is_retry, self._clock(), None
                # At once, due or not: from its first layer on a pass notices who has been preempted.
                computed = self._next_layer(self._passes[-1])
                if computed is not None:
                    return computed
        while self._passes and not (self._scheduler.is_decoding and self.pace.is_due(self._clock())):
            self._let_short_prompts_in(poll)
            computed = self._next_layer(self._passes[-1])
            if computed is not None:
                return computed
        chunks = self._scheduled(self._scheduler.decode)
        if not chunks:
            assert self._passes or not self._scheduler.has_requests, "requests are left but nothing is scheduled"
            return []
        started = self._clock()
        computed = self._forward(chunks, poll)
        now = self._clock()
        self.pace.answered(now, now - started)
        return computed

    def _scheduled(self, schedule: Callable[[], list[Chunk]]) -> list[Chunk]:
        started = self._clock()
        chunks = schedule()
        self.schedule_ms += (self._clock() - started) * 1e3
        return chunks

    def _next_prompts(self) -> list[Chunk]:
        """Chunks of the next pass."""
        while self._suspects:
            suspect = self._suspects.pop()
            if suspect.live:
                self._is_retry = True
                return [suspect]
        self._is_retry = False
        chunks = self._scheduler.prefill(self._max_prompt_tokens)
        ending = [chunk for chunk in chunks[1:] if chunk.draws]
        few, all_tokens = (sum(chunk.count for chunk in some) for some in (ending, chunks))
        # Sharing a pass with a long prompt takes long: prompts that end soon have every second one to themselves.
        self._oldest_waits = bool(few) and not self._oldest_waits and self.pace.is_much_shorter(few, all_tokens)
        return ending if self._oldest_waits else chunks

    def _let_short_prompts_in(self, poll: Callable[[], None] | None) -> None:
        """Begins a pass of prompts that came meanwhile between two layers of a longer one."""
        state = (self._scheduler.num_added, len(self._scheduler.running))
        if len(self._passes) > 1 or self._suspects or state == self._looked_at:
            return
        running = self._passes[0]
        budget = min(MAX_SHORT_TOKENS, self._max_prompt_tokens)
        chunks = self._scheduled(lambda: self._scheduler.short_prompts(budget, running.chunks))
        tokens = sum(chunk.count for chunk in chunks)
        if not chunks:
            self._looked_at = state
            return
        whole = self.pace.whole_s(running.num_tokens, running.seconds, running.share_done)
        left, spent = (1.0 - running.share_done) * whole, running.others_seconds
        if self.pace.may_overtake(tokens, whole_s=whole, left_s=left, overtaken_s=spent):
            self._passes.append(self._runner.begin(chunks, poll, between=True))

    def _prompts_and_answers(self, prompts: list[Chunk], poll: Callable[[], None] | None) -> list[Computed]:
        """A pass that ends before running answers are due takes their next tokens along."""
        answers = self._scheduled(self._scheduler.decode)
        chunks = answers + [chunk for chunk in prompts if chunk.live]  # one may have been preempted
        started = self._clock()
        computed = self._forward(chunks, poll)
        now = self._clock()
        self.pace.pass_done(sum(chunk.count for chunk in chunks), now - started)
        self.pace.answered(now)
        return computed

    def _next_layer(self, running: PrefillPass) -> list[Computed] | None:
        """Computes a layer of the pass; its chunks after the last one.

        A pass that fails is tried again chunk by chunk, the shortest first. It only writes the sequences' own slots, so
        doing it twice is harmless, and the others lose time and not their answer. One alone that found no memory has a
        second try with what was given back.
        """
        started = self._clock()
        try:
            drawables = running.advance()
        except Exception as error:  # noqa: BLE001
            failure = noted(error, running.chunks)
        else:
            return self._layer_done(running, drawables, self._clock() - started)
        self._passes.pop()
        self._recover(failure)
        live = _cheapest_first(running.chunks)
        if len(running.chunks) > 1 or (failure.is_out_of_memory and not running.is_retry):
            self._suspects += live[::-1]
        else:
            for chunk in live:
                self._fail(chunk, failure.text)
        return []

    def _layer_done(
        self, running: PrefillPass, drawables: Sequence[Drawable] | None, seconds: float
    ) -> list[Computed] | None:
        running.seconds += seconds
        self.pace.layer_done(seconds)
        if drawables is None:
            self._tell_progress(running)
            return None
        self._passes.pop()
        for longer in self._passes:
            longer.others_seconds += running.seconds
        live = [chunk for chunk in running.chunks if chunk.live]
        if len(live) == len(running.chunks):
            self.pace.pass_done(running.num_tokens, running.seconds)
        if not self._scheduler.is_decoding:
            self.pace.answered(self._clock())  # those whose prompt this was are the only ones
        return _with_logits(live, drawables)

    def _tell_progress(self, running: PrefillPass) -> None:
        """Within a pass tokens count in proportion to the layers they have been through."""
        now = self._clock()
        if now - self._told >= _PROGRESS_S:
            self._told = now
            for chunk in running.chunks:
                if chunk.live:
                    done = chunk.start + int(chunk.count * running.share_done)
                    self.progress.append(PrefillProgress(chunk.request.rid, done))

    def _forward(
        self, chunks: list[Chunk], poll: Callable[[], None] | None, *, is_retry: bool = False
    ) -> list[Computed]:
        """Each chunk with its logits. Sequences that are aborted meanwhile or whose forward fails are left out.

        A failing batch is run again as a failing pass is, but in halves, until those who fail alone are found.
        """
        try:
            logits = self._runner.forward(chunks, poll)
            return _with_logits([chunk for chunk in chunks if chunk.live], logits)
        except Exception as error:  # noqa: BLE001
            failure = noted(error, chunks)
        self._recover(failure)
        was_alone = len(chunks) == 1
        chunks = _cheapest_first(chunks)
        if len(chunks) > 1:
            half = len(chunks) // 2
            # Copied: the next forward may reuse the memory.
            first = [(chunk, _copied(logits)) for chunk, logits in self._forward(chunks[:half], poll, is_retry=True)]
            return first + self._forward([c for c in chunks[half:] if c.live], poll, is_retry=True)
        if chunks and (not was_alone or (failure.is_out_of_memory and not is_retry)):
            return self._forward(chunks, poll, is_retry=True)
        for chunk in chunks:
            self._fail(chunk, failure.text)
        return []

    def _recover(self, failure: StepFailure) -> None:
        """Once the exception, and what its frames held, is gone."""
        self.out_of_memory += failure.is_out_of_memory
        self._runner.recover()


def noted(error: Exception, chunks: Sequence[Chunk]) -> StepFailure:
    """The failure, logged as text: a record with the exception would keep its frames where a handler keeps records."""
    text = traceback.format_exc() if len(chunks) == 1 else str(error)
    logger.warning("a forward of %d sequences failed: %s", len(chunks), text)
    return StepFailure.of(error)


def _cheapest_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Those alive: the shortest, then the oldest."""
    return sorted((chunk for chunk in chunks if chunk.live), key=lambda c: (c.count, c.request.arrival))


def _copied(logits: Drawable | None) -> Drawable | None:
    return logits.copy() if isinstance(logits, np.ndarray) else logits


def _with_logits(chunks: Sequence[Chunk], logits: Sequence[Drawable]) -> list[Computed]:
    rows = iter(logits)
    return [(chunk, next(rows) if chunk.draws else None) for chunk in chunks]
