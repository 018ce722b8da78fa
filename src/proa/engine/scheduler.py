"""Which tokens of which sequences the next forward pass computes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from proa.engine.prefill_pace import share_tokens
from proa.engine.request import Request
from proa.kvcache.manager import BlockTable, KVManager

__all__ = ["Chunk", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + count` of `request`, computed in this step. After its last one it `draws` the next."""

    request: Request
    table: BlockTable
    start: int
    count: int
    draws: bool

    @property
    def live(self) -> bool:
        """False once the request has ended, its blocks given back."""
        return self.request.table is self.table


class Scheduler:
    """Continuous batching: what a prefill pass computes, and what a decode step does.

    A decode step takes one token of each decoding sequence. A pass takes prompt tokens of the running sequences that
    lack more than one (`share_tokens`), after waiting ones are admitted in order of arrival while a place and KV blocks
    for all their tokens are left. Between the layers of a pass the engine runs decode steps, and passes of shorter
    prompts (`short_prompts`); whoever is preempted then has no live chunk in it any more.

    A decoding sequence that needs a block when none can be evicted preempts the youngest one. Reserving blocks for
    prompt + max_tokens instead would never preempt, but clients leave max_tokens at the rest of the context, so one
    request would reserve the cache for itself. A preempted sequence keeps its tokens and seed and goes back to its
    place in the queue; its blocks stay in the prefix cache until somebody needs them, the rest is computed again, to
    the same bits. Nothing starves: the oldest sequence is never preempted for another, and one of full length fits.

    A request whose prompt continues what a running prefill computes now waits for it and then finds it in the prefix
    cache; so the n choices of one request, or many requests with one system prompt, compute it once. It waits only for
    running work, and requests behind it may pass.
    """

    def __init__(self, manager: KVManager, *, max_running: int, max_prompts: int | None = None) -> None:
        """`max_prompts`: of which a pass computes tokens; None: as many as run."""
        self._manager = manager
        self._max_running = max_running
        self._max_prompts = max_running if max_prompts is None else max_prompts
        # Both in order of arrival.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # Totals since start; a request counts once, at its first admission.
        self.num_added = 0  # each time it comes into the queue
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=_arrival)
        self.num_added += 1

    def remove(self, request: Request, *, keep_prefix: bool = True) -> None:
        """Take out a finished, aborted or failed request and free its blocks, at once usable by others.

        `keep_prefix` caches what it computed; False forgets it, when it cannot be trusted.
        """
        if request.table is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._release(request, keep_prefix=keep_prefix)

    @property
    def has_requests(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.waiting)

    @property
    def is_decoding(self) -> bool:
        """Whether a decode step has anything to do."""
        return any(request.num_remaining == 1 for request in self.running)

    def prefill(self, budget: int) -> list[Chunk]:
        """Chunks of the next pass, of `budget` tokens at most. Not while another pass is on its way."""
        self._admit()
        prompts = [request for request in self.running if request.num_remaining > 1][: self._max_prompts]
        counts = share_tokens(budget, [request.num_remaining for request in prompts])
        return [_chunk(request, count) for request, count in zip(prompts, counts, strict=True) if count]

    def short_prompts(self, budget: int, running: Sequence[Chunk]) -> list[Chunk]:
        """Chunks of whole prompts, the shortest first, `budget` tokens at most, while a pass of `running` goes on."""
        self._admit()
        own = {chunk.request.rid for chunk in running if chunk.live}
        lacking = [request for request in self.running if request.num_remaining > 1 and request.rid not in own]
        chunks: list[Chunk] = []
        for request in sorted(lacking, key=lambda request: request.num_remaining)[: self._max_prompts]:
            budget -= request.num_remaining
            if budget < 0:
                break
            chunks.append(_chunk(request, request.num_remaining))
        return chunks

    def decode(self) -> list[Chunk]:
        """Chunks of the next decode step, oldest sequence first. Sequences in a pass are none of it."""
        chunks: list[Chunk] = []
        for request in list(self.running):
            if request.table is None:
                continue  # preempted for an older one in this very loop
            if request.num_remaining == 1 and self._make_room(request):
                chunks.append(_chunk(request, 1))
        return chunks

    def _make_room(self, request: Request) -> bool:
        """A slot for the last token of `request`; False when it was itself the youngest and had to go."""
        assert request.table is not None
        while not self._manager.extend(request.table, len(request.tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request, keep_prefix=True)
        self.add(request)
        self.num_preempted += 1

    def _release(self, request: Request, *, keep_prefix: bool) -> None:
        assert request.table is not None
        if keep_prefix:
            self._manager.commit(request.table, request.tokens, request.num_computed)
        self._manager.close(request.table, forget=not keep_prefix)
        request.table = None
        request.num_computed = 0

    def _admit(self) -> None:
        """Start waiting requests in order; stop at the first that does not fit."""
        prompts = sum(request.num_remaining > 1 for request in self.running)
        # At most one look at each place there could be: the queue may be long and every look compares prompts.
        for request in self.waiting[: self._max_running]:
            if prompts >= self._max_prompts or len(self.running) == self._max_running:
                return
            if self._prefix_is_coming(request):
                continue
            # One block for each running sequence, lest the newcomer is preempted at once.
            table = self._manager.open(request.tokens, headroom=len(self.running))
            if table is None:
                return
            self.waiting.remove(request)
            insort(self.running, request, key=_arrival)
            request.table = table
            request.num_computed = table.num_shared * self._manager.block_size
            if request.cached_tokens is None:
                request.cached_tokens = request.num_computed
                self.num_hit_tokens += request.num_computed
                self.num_prompt_tokens += request.prompt_len
            prompts += request.num_remaining > 1

    def _prefix_is_coming(self, request: Request) -> bool:
        """Whether a running prefill is about to compute a block this request starts with."""
        if not self._manager.prefix_cache:
            return False
        block_size = self._manager.block_size
        for other in self.running:
            start = other.num_computed // block_size * block_size
            end = start + block_size
            # The last token of a prompt is always computed, so only blocks before it can be waited for. That block is
            # compared first: it tells most prompts apart without a walk through all of them.
            if (
                end < len(request.tokens)
                and end <= other.prompt_len
                and request.tokens[start:end] == other.tokens[start:end]
                and request.tokens[:start] == other.tokens[:start]
            ):
                return True
        return False


def _chunk(request: Request, count: int) -> Chunk:
    assert request.table is not None
    return Chunk(request, request.table, request.num_computed, count, count == request.num_remaining)


def _arrival(request: Request) -> int:
    return request.arrival
