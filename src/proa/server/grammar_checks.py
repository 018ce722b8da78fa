"""Grammars of clients are compiled in processes of their own before the engine sees them; what passed is remembered."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import sys
from collections import OrderedDict

import msgspec

from proa.chat.grammar.build import BuiltConstraint
from proa.chat.grammar.check_messages import CPU_SECONDS, CheckReply, CheckRequest, frame
from proa.core.constraint import Constraint
from proa.core.errors import QueueFullError, UserError

__all__ = ["GrammarChecks"]

logger = logging.getLogger("proa.server.grammar")

_NUM_WORKERS = 2
_MAX_PENDING = 64
# What is remembered are errors, and translations that are not longer than this.
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_CHARACTERS = 16 * 1024
# The process limits its own CPU time; this is for one that does not get any.
_WALL_SECONDS = 20.0
_LOST = CheckReply(error=f"one that takes more than {CPU_SECONDS:.0f} s or too deep a recursion to compile")


class GrammarChecks:
    """Checks grammars off the event loop. Nothing a client sends can hurt more than a worker, which is replaced."""

    def __init__(self) -> None:
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers = [_Worker() for _ in range(_NUM_WORKERS)]
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._running: dict[str, asyncio.Task[CheckReply]] = {}
        self._known: OrderedDict[str, CheckReply] = OrderedDict()

    async def constraint(self, built: BuiltConstraint | None) -> Constraint | None:
        """The constraint, its grammar checked.

        Raises:
            UserError: a grammar that cannot be compiled within the limits.      QueueFullError: too many are waiting.
        """
        if built is None or built.check is None:
            return None if built is None else built.constraint
        reply = await self._reply(CheckRequest(built.check, built.is_ebnf))
        if reply.error:
            raise UserError(built.where, "a schema or grammar that can be compiled", reply.error, code="invalid_schema")
        return msgspec.structs.replace(built.constraint, grammar=reply.grammar) if built.is_ebnf else built.constraint

    async def close(self) -> None:
        """End the worker processes."""
        for task in self._running.values():
            task.cancel()
        for worker in self._workers:
            await worker.stop()

    async def _reply(self, request: CheckRequest) -> CheckReply:
        key = hashlib.sha256(msgspec.msgpack.encode(request)).hexdigest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if (task := self._running.get(key)) is None:
            if len(self._running) >= _MAX_PENDING:
                raise QueueFullError(_MAX_PENDING)
            task = asyncio.create_task(self._check(key, request))
            self._running[key] = task
        # A client that leaves does not take the answer from others who wait for the same.
        return await asyncio.shield(task)

    async def _check(self, key: str, request: CheckRequest) -> CheckReply:
        try:
            worker = await self._idle.get()
            try:
                reply = await worker.check(request)
            finally:
                self._idle.put_nowait(worker)
            if reply is None:
                return _LOST
            if len(reply.error) + len(reply.grammar) <= _MAX_REMEMBERED_CHARACTERS:
                self._known[key] = reply
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
            return reply
        finally:
            del self._running[key]


class _Worker:
    """One process, started when it is needed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def check(self, request: CheckRequest) -> CheckReply | None:
        """The answer; `_LOST` when the process died of it, None when it did not come in time."""
        if self._process is None:
            self._process = await _start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(_WALL_SECONDS):
                process.stdin.write(frame(request))
                await process.stdin.drain()
                header = await process.stdout.readexactly(4)
                body = await process.stdout.readexactly(int.from_bytes(header, "little"))
            return msgspec.msgpack.decode(body, type=CheckReply)
        except TimeoutError:
            logger.warning("a grammar was given up after %.0f s", _WALL_SECONDS)
            await self.stop()
            return None
        except (OSError, asyncio.IncompleteReadError):
            logger.warning("a grammar ended the process that compiled it")
            await self.stop()
            return _LOST
        except BaseException:
            # Cancelled at shutdown: an answer may be half read.
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _start() -> asyncio.subprocess.Process:
    # A session of its own: Ctrl-C is for the server.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proa.chat.grammar.checker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
