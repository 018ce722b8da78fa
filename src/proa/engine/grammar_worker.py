"""Compiles the grammars of requests in a thread of its own, so that no running sequence waits for one."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from proa.chat.grammar.matcher import GrammarError, Matcher, Vocabulary
from proa.ipc.messages import Generate

__all__ = ["GrammarWaiters", "GrammarWorker"]

logger = logging.getLogger("proa.engine")

_MAX_COMPILED = 64
# Compiling recurses over references: what fits the checker's stack of 8 MB fits here. Untouched pages are free.
_STACK_BYTES = 64 << 20


class GrammarWorker:
    """Compiles one grammar after another and remembers the last ones. Reads the vocabulary when it is first needed."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()  # of what is remembered
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._tasks: queue.SimpleQueue[tuple[str, Future[Matcher]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def matcher(self, grammar: str) -> Future[Matcher]:
        """A matcher at the beginning of `grammar`; done already if it is remembered. Called by one thread only.

        The future fails with GrammarError, or with what kept the vocabulary from being read.
        """
        future: Future[Matcher] = Future()
        if (known := self._copy_of(grammar)) is not None:
            future.set_result(known)
            return future
        if self._thread is None:
            self._thread = self._started()
        self._tasks.put((grammar, future))
        return future

    def prepare(self) -> None:
        """Read the vocabulary now, in the thread."""
        self.matcher("start: ")

    def _copy_of(self, grammar: str) -> Matcher | None:
        with self._lock:
            if (known := self._compiled.get(grammar)) is None:
                return None
            self._compiled.move_to_end(grammar)
            return known.copy()

    def _compile(self, grammar: str) -> Matcher:
        if (known := self._copy_of(grammar)) is not None:
            return known
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        pattern = self._vocabulary.compile(grammar)
        with self._lock:
            self._compiled[grammar] = pattern
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return pattern.copy()

    def _started(self) -> threading.Thread:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        return thread

    def _run(self) -> None:
        while True:
            grammar, future = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._compile(grammar))
            except GrammarError as error:
                future.set_exception(error)
            except Exception as error:  # noqa: BLE001
                logger.warning("no vocabulary for grammars: %s", error)
                future.set_exception(error)


class GrammarWaiters:
    """Sequences that wait for their grammar, by rid. Used by one thread."""

    def __init__(self, worker: GrammarWorker | None) -> None:
        """`worker`: None for an engine that has none; every sequence then fails."""
        self._worker = worker
        self._waiting: dict[str, tuple[Generate, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def __contains__(self, rid: str) -> bool:
        return rid in self._waiting

    def add(self, message: Generate) -> None:
        """Wait for the grammar of `message`."""
        assert message.constraint is not None
        if self._worker is None:
            future: Future[Matcher] = Future()
            future.set_exception(GrammarError("this engine takes no grammars"))
        else:
            future = self._worker.matcher(message.constraint.grammar)
        self._waiting[message.rid] = (message, future)

    def remove(self, rid: str) -> bool:
        """Wait no longer; False when it did not."""
        if (waiting := self._waiting.pop(rid, None)) is None:
            return False
        waiting[1].cancel()
        return True

    def take_ready(self) -> list[tuple[Generate, Matcher | BaseException]]:
        """Those whose wait is over, in their order, each with its matcher or what went wrong."""
        ready = [(rid, future) for rid, (_, future) in self._waiting.items() if future.done()]
        return [(self._waiting.pop(rid)[0], future.exception() or future.result()) for rid, future in ready]
