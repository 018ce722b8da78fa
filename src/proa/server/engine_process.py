"""Starts the engine process, watches it and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from proa.core.errors import ConfigError
from proa.ipc.messages import Fatal, FromEngine, Loading, Ready, Shutdown, ToEngine
from proa.ipc.transport import ClientEndpoint, EngineAddresses
from proa.server.process_threads import describe_threads

__all__ = ["EngineProcess", "EngineState", "EngineStatus", "RestartPolicy"]

logger = logging.getLogger("proa.server.engine")

_STOP_SECONDS = 5.0
_DIRECTORY_PREFIX = "proa-"
_WATCHDOG_TICKS = 10
_STACKS_SECONDS = 0.5  # to write them


class EngineState(enum.StrEnum):
    """Where the engine process stands. Only READY takes requests; FAILED is final."""

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for observers (the CLI's progress display) and `/readyz`.

    `user_error` tells that the configuration or checkpoint is to blame for `message`, `is_shortage` that it is memory.
    """

    state: EngineState = EngineState.STOPPED
    bytes_done: int = 0
    bytes_total: int = 0
    pid: int = 0
    restarts: int = 0
    message: str = ""
    user_error: bool = False
    is_shortage: bool = False


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds to wait before a restart: `first`, doubled each time up to `longest`. Starts in a row that may fail."""

    first: float = 1.0
    longest: float = 60.0
    max_start_attempts: int = 3


class EngineProcess:
    """Supervises one engine. Everything runs on the event loop that calls `run`.

    Args:
        command: program and arguments of the engine.
        config: JSON object it reads on stdin; `to_engine`, `from_engine` and `parent_pid` are filled in here.
        watchdog_timeout: seconds of silence after which an engine that was ready is killed, its stacks in the log
            first. It sends something at every step, and every second when idle or as layers of a step are finished.
        on_message: called with each message of the engine.
        on_down: called with a reason whenever an engine that was started is gone.
        on_status: called with each new status.
    """

    def __init__(
        self,
        command: list[str],
        config: bytes,
        *,
        policy: RestartPolicy,
        watchdog_timeout: float,
        on_message: Callable[[FromEngine], None],
        on_down: Callable[[str], None],
        on_status: Callable[[EngineStatus], None],
    ) -> None:
        self._command = command
        self._config = _parse_config(config)
        self._policy = policy
        self._watchdog_timeout = watchdog_timeout
        self._on_message = on_message
        self._on_down = on_down
        self._on_status = on_status
        self._outgoing: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._fatal: Fatal | None = None
        self._silent_ticks = 0
        self._is_stalled = False
        self._directory: Path | None = None
        self._ready_since: float | None = None
        self._ever_ready = False
        self.status = EngineStatus()

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the running engine; dropped with it when it dies."""
        self._outgoing.put_nowait(message)

    async def run(self) -> None:
        """Keep an engine running until it fails for good or this task is cancelled."""
        failures = 0
        remove_stale_directories()
        try:
            while True:
                self._ready_since = None
                reason = await self._run_once()
                failures = 1 if self._was_stable() else failures + 1
                if self._finished(failures, reason):
                    return
                delay = min(self._policy.first * 2 ** (failures - 1), self._policy.longest)
                logger.warning("%s; starting it again in %.1f s", reason, delay)
                self._set(
                    state=EngineState.RESTARTING, message=reason, restarts=self.status.restarts + 1, pid=0, bytes_done=0
                )
                await asyncio.sleep(delay)
        finally:
            await self._stop()
            self.remove_directory()

    def kill(self) -> None:
        """SIGKILL to the engine and everything it started, now."""
        if self._process is not None and self._process.returncode is None:
            self._kill_group(self._process.pid)

    def remove_directory(self) -> None:
        """Remove the sockets' directory, if it is still there."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    @staticmethod
    def _kill_group(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _was_stable(self) -> bool:
        """Whether the engine served for longer than the longest wait, so that its end is a new story."""
        return self._ready_since is not None and time.monotonic() - self._ready_since > self._policy.longest

    def _end_reason(self, code: int) -> str:
        if self._is_stalled:
            return f"the engine process gave no sign of life for {self._watchdog_timeout:g} s and was killed"
        return self._fatal.message if self._fatal is not None else f"the engine process {_describe_exit(code)}"

    def _finished(self, failures: int, reason: str) -> bool:
        fatal = self._fatal
        user_error = fatal is not None and fatal.user
        gave_up = failures >= self._policy.max_start_attempts and not self._ever_ready
        if not user_error and not gave_up:
            return False
        message = fatal.message if fatal is not None else reason
        is_shortage = fatal is not None and fatal.is_shortage
        self._set(state=EngineState.FAILED, message=message, user_error=user_error, is_shortage=is_shortage, pid=0)
        return True

    async def _run_once(self) -> str:
        """Start an engine and serve it until its end. Returns why it ended."""
        self._fatal = None
        self._is_stalled = False
        self._outgoing = asyncio.Queue()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-"))
        addresses = EngineAddresses.in_directory(self._directory)
        endpoint = ClientEndpoint(addresses)
        self._set(state=EngineState.STARTING)
        tasks: list[asyncio.Task[None]] = []
        try:
            process = self._process = await self._spawn(addresses)
            logger.info("engine process %d started", process.pid)
            self._set(pid=process.pid)
            work = (self._send_all(endpoint), self._receive_all(endpoint), self._watch())
            tasks = [asyncio.create_task(coroutine) for coroutine in work]
            code = await process.wait()
            # What it said last (Fatal) may still be on its way through the socket.
            await asyncio.wait(tasks, timeout=0.1)
        except asyncio.CancelledError:
            await self._ask_to_end(endpoint)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            endpoint.close()
            self.remove_directory()
        self._kill_group(process.pid)
        reason = self._end_reason(code)
        self._on_down(reason)
        return reason

    async def _spawn(self, addresses: EngineAddresses) -> asyncio.subprocess.Process:
        config = {
            **self._config,
            "to_engine": addresses.to_engine,
            "from_engine": addresses.from_engine,
            "parent_pid": os.getpid(),
        }
        wrapper = Path(__file__).with_name("die_with_parent.py")
        # A session of its own: Ctrl-C in a terminal must reach the API process only, which then drains.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-E", str(wrapper), str(os.getpid()), *self._command,
            stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(msgspec.json.encode(config))
            await process.stdin.drain()
        process.stdin.close()
        return process

    async def _send_all(self, endpoint: ClientEndpoint) -> None:
        while True:
            await endpoint.send(await self._outgoing.get())

    async def _receive_all(self, endpoint: ClientEndpoint) -> None:
        while True:
            message = await endpoint.receive()
            # Both sockets are connected: without names nobody else reaches them, and a kill leaves no files.
            self.remove_directory()
            self._silent_ticks = 0
            match message:
                case Loading():
                    self._set(state=EngineState.LOADING, bytes_done=message.bytes_done, bytes_total=message.bytes_total)
                case Ready():
                    self._ready_since = time.monotonic()
                    self._ever_ready = True
                    self._on_message(message)
                    self._set(state=EngineState.READY, message="")
                    continue
                case Fatal():
                    self._fatal = message
            self._on_message(message)

    async def _watch(self) -> None:
        """Kill an engine that stopped reporting; `_run_once` sees it end.

        Silence is counted in ticks, not read from a clock: while this process itself is stopped (Ctrl-Z) it is not
        the engine that is late.
        """
        self._silent_ticks = 0
        while True:
            await asyncio.sleep(self._watchdog_timeout / _WATCHDOG_TICKS)
            self._silent_ticks += 1
            if self._silent_ticks > _WATCHDOG_TICKS and self.status.state is EngineState.READY:
                self._is_stalled = True
                await self._log_stacks()
                self.kill()
                return

    async def _log_stacks(self) -> None:
        """What the engine hangs in: its Python stacks, which it writes to the log itself, and its native threads."""
        assert self._process is not None
        pid = self._process.pid
        logger.error("the engine process %d hangs; its threads: %s", pid, describe_threads(pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        await asyncio.sleep(_STACKS_SECONDS)

    async def _ask_to_end(self, endpoint: ClientEndpoint) -> None:
        """Shutdown by message: the engine leaves SIGTERM to us. One that loads would not hear it."""
        process = self._process
        if process is None or process.returncode is not None or self.status.state is not EngineState.READY:
            return
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await endpoint.send(Shutdown())
                await process.wait()
        except TimeoutError:
            logger.warning("the engine process %d does not end; killing it", process.pid)

    async def _stop(self) -> None:
        """The engine is gone after this."""
        process = self._process
        if process is not None and process.returncode is None:
            self.kill()
            await process.wait()
        if self.status.state is not EngineState.FAILED:
            self._set(state=EngineState.STOPPED, pid=0)

    def _set(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self._on_status(self.status)


def remove_stale_directories() -> None:
    """Remove socket directories of API processes that were killed and could not do so."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}[0-9]*-*"):
        owner = directory.name.removeprefix(_DIRECTORY_PREFIX).split("-", 1)[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not Path(f"/proc/{owner}").exists() and directory.stat().st_uid == os.getuid():
                shutil.rmtree(directory, ignore_errors=True)


def _parse_config(config: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(config, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError("engine config", "a JSON object", str(error)) from error


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
