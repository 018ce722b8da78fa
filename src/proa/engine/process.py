"""How the engine process is tied to the API process that started it."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["parent_is_gone", "tie_to_parent"]

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int) -> int:
    """Die with the parent, leave signals of the terminal and of a service manager to it; return the parent's pid.

    The parent drains and sends Shutdown, so SIGINT and SIGTERM must not cut its streams. SIGKILL works as ever.
    The kernel's death signal watches the *thread* that forked; the parent has to start the engine from one that lasts.
    """
    parent_pid = parent_pid or os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return parent_pid


def parent_is_gone(parent_pid: int) -> bool:
    """Whether the parent ended; true too when it did so before `tie_to_parent` could watch it."""
    return os.getppid() != parent_pid
