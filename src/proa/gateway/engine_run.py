"""One run of an engine, from its preparation to the end of its last process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proa.gateway.backends import BACKENDS, Backend
from proa.gateway.config import ModelConfig
from proa.gateway.invocation import invoke, weight_bytes
from proa.gateway.leases import Engine
from proa.gateway.load_watch import LoadWatch
from proa.gateway.log_ring import LogRing
from proa.gateway.ports import free_port, is_free, is_listener
from proa.gateway.preparation import PreparationError, prepare
from proa.gateway.process import KeptProcess
from proa.gateway.status import LoadProgress, Phase
from proa.gateway.upstream import UpstreamError, UpstreamRequest, open_exchange

__all__ = ["EngineRun", "RunReports"]

logger = logging.getLogger("proa.gateway")

_PORT_ATTEMPTS = 5
_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 1.0
_ANSWER_SECONDS = 30.0
_MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RunReports:
    """Who is told what: `ready` once requests are taken, `stalled` with a reason when a start makes no progress."""

    ready: Callable[[], None]
    stalled: Callable[[str], None]
    progress: Callable[[LoadProgress], None]


class EngineRun:
    """Call `run` once; `halt` ends it early. `engine` is there while the process runs.

    Args:
        installing: held by the run that may install an engine; all of a supervisor's share it.
        usual_seconds: what the last successful start took.
    """

    def __init__(
        self,
        model: ModelConfig,
        log: LogRing,
        reports: RunReports,
        clock: Callable[[], float],
        *,
        installing: asyncio.Lock,
        usual_seconds: float | None = None,
    ) -> None:
        self._model = model
        self._installing = installing
        self._backend: Backend = BACKENDS[model.backend]
        self._log = log
        self._reports = reports
        self._clock = clock
        self._halt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: KeptProcess | None = None
        self._watch = LoadWatch(clock(), model.stall_timeout, usual=usual_seconds)
        self._last_line = ""
        self._headers: Mapping[str, str] = {}
        self._ready_path = model.ready_path or self._backend.ready_path
        self.engine: Engine | None = None

    @property
    def progress(self) -> LoadProgress:
        """How far the start is."""
        return self._watch.progress(self._clock())

    def halt(self) -> None:
        """End it: SIGTERM, and SIGKILL after the model's `stop_timeout`."""
        if not self._halt.done():
            self._halt.set_result(None)

    async def run(self) -> str:
        """Start the engine and stay until nothing is left of it; returns why it ended."""
        reason = "the gateway failed; see its log"
        try:
            self._watch.bytes_total = await asyncio.to_thread(weight_bytes, self._model)
            await self._prepare()
            reason = await self._attempts()
        except PreparationError as error:
            reason = str(error)
        except OSError as error:
            reason = f"it could not be started: {error}"
        except Exception:
            logger.exception("the run of %s failed", self._model.name)
        finally:
            await self._kill()
            if self.engine is not None:
                self.engine.end_reason = reason
            self._write(f"ended: {reason}")
        return reason

    async def _prepare(self) -> None:
        if not self._model.auto_build:
            await prepare(self._backend, self._model, self._tool, lambda: None)
            return
        waiting = asyncio.create_task(self._installing.acquire())
        await self._first_of(waiting)
        if not waiting.done():
            waiting.cancel()
            raise PreparationError(self._model.name, "an installation", "the end of this start")
        try:
            await prepare(self._backend, self._model, self._tool, lambda: self._enter("installing"))
        finally:
            self._installing.release()

    async def _attempts(self) -> str:
        """Runs on one port after another while somebody else takes the port first."""
        reason = "halted"
        for _ in range(1 if self._model.port else _PORT_ATTEMPTS):
            if self._halt.done():
                break
            port = self._model.port or free_port(self._model.host)
            if self._model.port and not is_free(self._model.host, port):
                return f"port {port} is in use"
            is_port_lost, reason = await self._attempt(port)
            if not is_port_lost or self._halt.done():
                break
            self._write(f"port {port} was taken by another program; trying another one")
        return reason

    async def _attempt(self, port: int) -> tuple[bool, str]:
        """One process; whether it lost its port, and why it ended."""
        made = invoke(self._backend, self._model, port)
        self._enter("loading")
        self._headers = made.headers
        self._write(f"starting: {_without_secret(shlex.join(made.command), made.headers)}")
        self._last_line = ""
        process = self._process = await KeptProcess.start(made.command, made.env, self._on_line)
        self.engine = Engine(f"http://{_in_url(self._model.host)}:{port}", dict(made.headers), process.pid)
        is_port_lost = not await self._until_ready(process, port)
        if is_port_lost:
            await self._kill()
        was_ready = self._watch.phase == "ready"
        code = await self._until_end(process)
        self._process = None
        reason = _describe(code) + self._last_words
        if not was_ready and not self._halt.done() and not is_free(self._model.host, port):
            is_port_lost = True
        return is_port_lost, f"port {port} is in use; {reason}" if is_port_lost else reason

    async def _until_ready(self, process: KeptProcess, port: int) -> bool:
        """Stay until it is ready, has ended or is to end; False when another program answers on its port."""
        asking = asyncio.create_task(self._keep_asking(port))
        watching = asyncio.create_task(self._keep_watching(process))
        try:
            await self._first_of(asking, process.ended)
            if not asking.done() or process.ended.done() or self._halt.done():
                return True
            if self._backend.listens_itself and is_listener(process.members(), port) is False:
                return False
        finally:
            for task in (asking, watching):
                task.cancel()
            await asyncio.gather(asking, watching, return_exceptions=True)
        asking.result()
        self._enter("ready")
        self._write(f"ready after {self.progress.elapsed:.1f} s")
        self._reports.ready()
        return True

    async def _keep_asking(self, port: int) -> None:
        """Return when the ready check has been answered with 200."""
        pause = _FIRST_POLL_S
        while True:
            await asyncio.sleep(pause)
            pause = min(1.3 * pause, _LONGEST_POLL_S)
            status, answer = await self._ask(port)
            if (report := self._backend.reported_bytes(answer)) is not None:
                self._watch.saw_report(*report, self._clock())
            if status == 200:
                return

    async def _keep_watching(self, process: KeptProcess) -> None:
        """Note what is read, tell of progress, and once of its absence."""
        pause = max(_FIRST_POLL_S, min(self._model.stall_timeout / 4, _LONGEST_POLL_S))
        while True:
            await asyncio.sleep(pause)
            self._watch.saw_reads(await asyncio.to_thread(_bytes_read, process), self._clock())
            self._reports.progress(self.progress)
            if (silent := self._watch.stalled_for(self._clock())) is not None:
                self._reports.stalled(f"no progress of its start for {silent:.0f} s{self._last_words}")
                return

    async def _ask(self, port: int) -> tuple[int, bytes]:
        assert self.engine is not None
        headers = {"host": f"{_in_url(self._model.host)}:{port}", **self.engine.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = UpstreamRequest(b"GET", self._ready_path.encode(), encoded, b"")
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                exchange = await open_exchange(self._model.host, port, request, where=f"model {self._model.name}")
                try:
                    await exchange.head()
                    body = b""
                    while len(body) < _MAX_ANSWER_BYTES and (data := await exchange.read()):
                        body += data
                    return exchange.status, body
                finally:
                    exchange.abort()
        except (UpstreamError, TimeoutError):
            return 0, b""

    async def _until_end(self, process: KeptProcess) -> int:
        await self._first_of(process.ended)
        if not process.ended.done():
            await process.stop(self._model.stop_timeout)
        return await process.wait()

    async def _first_of(self, *futures: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait for one of them, or the wish to end it all."""
        waited_for: list[asyncio.Future[Any]] = [*futures, self._halt]
        await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def _tool(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> tuple[int, list[str]]:
        """Run a command to its end, its output in the log. Halting ends it."""
        output: list[str] = []

        def on_line(line: str, keep: bool) -> None:
            output.append(line)
            self._on_line(line, keep)

        process = self._process = await KeptProcess.start(command, environment, on_line)
        await self._first_of(process.ended, seconds=seconds)
        process.kill()
        code = await process.wait()
        self._process = None
        return code, output

    async def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def _enter(self, phase: Phase) -> None:
        self._watch.enter(phase, self._clock())
        self._reports.progress(self.progress)

    def _on_line(self, line: str, keep: bool) -> None:
        if self._watch.phase == "loading" and f"GET {self._ready_path}" in line:
            return  # the echo of our own asking: no progress, and as many lines as seconds
        line = _without_secret(line, self._headers)
        self._last_line = line
        self._watch.saw_line(line, self._clock())
        if keep:
            self._log.write(line)

    @property
    def _last_words(self) -> str:
        return f"; its last line: {self._last_line[:500]}" if self._last_line else ""

    def _write(self, line: str) -> None:
        self._log.write(f"[gateway] {line}")


def _bytes_read(process: KeptProcess) -> dict[int, int]:
    """Bytes each member has read, from files or (mapped ones) from the disk."""
    found = {}
    for pid in process.members():
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            found[pid] = max(int(fields["rchar"]), int(fields["read_bytes"]))
    return found


def _describe(code: int) -> str:
    if code == -signal.SIGKILL:
        return "it was killed by SIGKILL, perhaps for want of memory"
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit status {code}"


def _without_secret(text: str, headers: Mapping[str, str]) -> str:
    """Engines write their settings into their logs, which more people read than may use them past the gateway."""
    for value in headers.values():
        text = text.replace(value.removeprefix("Bearer "), "KEY")
    return text


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
