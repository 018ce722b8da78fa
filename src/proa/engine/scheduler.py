"""Which tokens of which sequences the next forward pass computes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from proa.engine.prefill_pace import PrefillPace
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
    """Continuous batching, first come first served.

    Every step takes one token of each decoding sequence and as many prompt tokens as `pace` gives of the oldest
    sequences still in prefill; then waiting requests are admitted while a place, KV blocks for all their tokens and
    prompt budget are left.

    A decoding sequence that needs a block when none can be evicted preempts the youngest one. Reserving blocks for
    prompt + max_tokens instead would never preempt, but clients leave max_tokens at the rest of the context, so one
    request would reserve the cache for itself. A preempted sequence keeps its tokens and seed and goes back to its
    place in the queue; its blocks stay in the prefix cache until somebody needs them, the rest is computed again, to
    the same bits. Nothing starves: the oldest sequence is never preempted for another, and one of full length fits.

    A request whose prompt continues what a running prefill computes now waits for it and then finds it in the prefix
    cache; so the n choices of one request, or many requests with one system prompt, compute it once. It waits only for
    running work, and requests behind it may pass.
    """

    def __init__(self, manager: KVManager, pace: PrefillPace, *, max_running: int) -> None:
        self._manager = manager
        self._pace = pace
        self._max_running = max_running
        # Both in order of arrival.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # Totals since start; a request counts once, at its first admission.
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=_arrival)

    def remove(self, request: Request, *, keep_prefix: bool = True) -> None:
        """Take out a finished, aborted or failed request and free its blocks, at once usable by others.

        `keep_prefix` caches what it computed; False forgets it, when it cannot be trusted.
        """
        if request.table is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._release(request, keep_prefix=keep_prefix)

    def schedule(self) -> list[Chunk]:
        """Chunks of the next step, oldest sequence first. Empty only when nothing is left to do."""
        chunks: list[Chunk] = []
        budget = self._pace.tokens(beside_decoding=any(request.num_remaining == 1 for request in self.running))
        preempted_before = self.num_preempted
        for request in list(self.running):
            if request.table is None:
                continue  # preempted for an older one in this very loop
            if request.num_remaining == 1:
                if not self._make_room(request):
                    continue
                count = 1
            else:
                count = min(request.num_remaining, budget)
                budget -= count
            if count:
                chunks.append(_chunk(request, count))
        if self.num_preempted == preempted_before:
            self._admit(chunks, budget)
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

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting requests in order; stop at the first that does not fit."""
        # At most one look at each place there could be: the queue may be long and every look compares prompts.
        for request in self.waiting[: self._max_running]:
            if budget == 0 or len(self.running) == self._max_running:
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
            count = min(request.num_remaining, budget)
            budget -= count
            chunks.append(_chunk(request, count))

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
