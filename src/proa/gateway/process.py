"""A process with all its descendants, run by a keeper: started, followed line by line, ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from proa.gateway import keeper

__all__ = ["KeptProcess"]

# How long output may still come after everything has ended: a descriptor that got away must not hold us.
_OUTPUT_SECONDS = 2.0
_KEEPER_SECONDS = 30.0
# A line costs some microseconds, and nobody else is served meanwhile.
_READ_BYTES = 4 * 1024
_MAX_LINE_BYTES = 16 * 1024
# In the environment of all that a run starts: it finds what is left when the keeper was killed.
_MARK = "PROA_GATEWAY_RUN"
_ROUNDS = 20
_ROUND_SECONDS = 0.05


class KeptProcess:
    """One run of a command. Everything of it is gone once `wait` returns. All use is on one event loop.

    Attributes:
        pid: of the command itself; its process group and session have the same number.
        ended: done when nothing is left, with what `wait` returns. Not to be cancelled.
    """

    ended: asyncio.Task[int]

    def __init__(self, kept: asyncio.subprocess.Process, control: socket.socket, output: _Output, mark: str) -> None:
        self.pid = 0
        self._mark = mark
        self._keeper = kept
        self._control = control
        self._output = output

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str, bool], None]
    ) -> Self:
        """Start a command.

        Args:
            environment: all of it.
            on_line: told every line of standard output and error, and whether it is to be kept; one that ends in a
                carriage return (a progress bar) is not.
        """
        mark = secrets.token_hex(16)
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        try:
            kept = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", keeper.__file__, *command,
                stdin=theirs.fileno(), stdout=writer, stderr=writer, env={**environment, _MARK: mark},
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        process = cls(kept, ours, _Output(reader, on_line), mark)
        process.ended = asyncio.create_task(process._end())
        ours.setblocking(False)
        try:
            await process._read_pid()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return process

    async def wait(self) -> int:
        """Wait until nothing is left; returns the exit status, or minus the signal that killed the command."""
        return await asyncio.shield(self.ended)

    async def stop(self, seconds: float) -> None:
        """SIGTERM to the group, SIGKILL to all descendants after `seconds`; returns when nothing is left."""
        self._order(b"t")
        await asyncio.wait([self.ended], timeout=seconds)
        if not self.ended.done():
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """SIGKILL to all descendants."""
        self._order(b"k")

    def members(self) -> list[int]:
        """Process ids of all that runs."""
        return keeper.descendants(self._keeper.pid)

    async def _read_pid(self) -> None:
        loop = asyncio.get_running_loop()
        line = b""
        async with asyncio.timeout(_KEEPER_SECONDS):
            while not line.endswith(b"\n"):
                if not (data := await loop.sock_recv(self._control, 32)):
                    return  # the keeper has ended; `wait` tells how
                line += data
        self.pid = int(line)

    async def _end(self) -> int:
        code = await self._keeper.wait()
        if code < 0:
            # The keeper itself was killed. The command has died with it; what it started has not.
            await self._kill_marked()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_SECONDS):
                await self._output.end.wait()
        self._output.close()
        self._control.close()
        return 128 - code if code > 128 else code

    async def _kill_marked(self) -> None:
        """Kill all that has the mark of this run; those that fork meanwhile are found by another round."""
        for _ in range(_ROUNDS):
            if not (left := await asyncio.to_thread(_marked, f"{_MARK}={self._mark}".encode())):
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_ROUND_SECONDS)

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            self._control.send(order)


def _marked(variable: bytes) -> list[int]:
    """Process ids of those whose environment began with the variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


class _Output:
    """Lines from a pipe. `end` is set at its end."""

    def __init__(self, descriptor: int, on_line: Callable[[str, bool], None]) -> None:
        self.end = asyncio.Event()
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def close(self) -> None:
        """Read no more."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            self._tell(self._rest)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self.end.set()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line)
        if b"\r" in self._rest or len(self._rest) > _MAX_LINE_BYTES:
            *bars, self._rest = self._rest.split(b"\r")
            for bar in bars[-1:]:
                self._tell(bar, keep=False)
            if len(self._rest) > _MAX_LINE_BYTES:
                self._tell(self._rest)
                self._rest = b""

    def _tell(self, line: bytes, *, keep: bool = True) -> None:
        # What stands before a carriage return was overwritten.
        if text := line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace").rstrip():
            self._on_line(text, keep)
