"""Run as a script: `keeper.py COMMAND...` runs COMMAND and leaves nothing of it behind, however the gateway ends.

Standard input is a socket to the gateway. The keeper first writes the process id of COMMAND and a line end. Then it
reads: `t` sends SIGTERM to the process group of COMMAND, `k` kills everything, and so does the end of the stream, which
is what the gateway's death looks like. It ends when COMMAND and all its descendants have ended, with the exit status of
COMMAND, or 128 + signal.

Everything means all descendants. Those that left the process group are found by their parents: the keeper is a child
subreaper, so orphans become its children. It is a process of its own because signals at a parent's death follow the
thread that forked, reach one generation only, and nothing in a killed process can clean up. It may use nothing but the
standard library (it runs with -I -S).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["descendants", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CONTROL = 0
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.5


def main(command: list[str]) -> int:
    """Run the command; returns its exit status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    keeper = os.getpid()
    if (engine := os.fork()) == 0:
        _become(command, keeper)
    with suppress(OSError):
        os.write(_CONTROL, b"%d\n" % engine)
    status = _watch(engine, wake_reader)
    _kill_all()
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def descendants(root: int) -> list[int]:
    """Process ids of the children of `root`, their children and so on; parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # The name in parentheses may contain anything; the parent is the second field after it.
                parent = int((entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(sorted(children.get(pid, [])))
    return found[1:]


def _become(command: list[str], keeper: int) -> None:
    """In the child: a session of its own, death with the keeper, the command."""
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)  # it died before the call above, and nobody would send the signal
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, _CONTROL)
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(2, f"[command] expected a program, got {command[0]!r} ({error.strerror}).\n".encode())
    finally:
        os._exit(127)


def _watch(engine: int, wake_reader: int) -> int:
    """Obey until the engine has ended; returns its wait status."""
    poll = select.poll()
    poll.register(_CONTROL, select.POLLIN | select.POLLHUP)
    poll.register(wake_reader, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wake_reader:
                os.read(wake_reader, 512)
            elif not _obey(engine):
                poll.unregister(_CONTROL)
                _kill(engine)
        if (status := _reap(engine)) is not None:
            return status


def _obey(engine: int) -> bool:
    """Do what the gateway wants; False when everything is to be killed."""
    try:
        orders = os.read(_CONTROL, 64)
    except OSError:
        return False
    if not orders or b"k" in orders:
        return False
    if b"t" in orders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(engine, signal.SIGTERM)
    return True


def _reap(engine: int) -> int | None:
    """Collect what has ended; the wait status of the engine if it is among them."""
    ended = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == engine:
                ended = status
    return ended


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill_all() -> None:
    """Kill descendants until there are none, however fast they fork."""
    pause = _FIRST_PAUSE_S
    while left := descendants(os.getpid()):
        for pid in left:
            _kill(pid)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        _reap(0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
