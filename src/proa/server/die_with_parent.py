"""Run as a script: `die_with_parent.py PARENT_PID COMMAND...` becomes COMMAND, which is killed when PARENT_PID dies.

A separate program, because setting this between fork and exec in a process with threads is not safe. It may use nothing
but the standard library (it runs with -S).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL at the parent's death, then exec the command."""
    parent, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit(f"[die_with_parent] expected prctl to work, got {os.strerror(ctypes.get_errno())}.")
    # The parent may have died before the call above: then nobody would send the signal.
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main(sys.argv[1:])
