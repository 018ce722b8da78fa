"""The only place that reads environment variables.

PROA_CACHE_DIR   where built models and measurements live; default $XDG_CACHE_HOME/proa or ~/.cache/proa
PROA_LOG_LEVEL   debug | info | warning | error; `--log-level` wins
PROA_API_KEY     key every request has to carry; `--api-key` wins (a flag is visible in `ps`, a variable is not)
PROA_BASE_URL    server that `proa chat` and `proa bench serve` talk to when none is named

NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID   set by systemd for services that tell it how they are

C++ reads one more, in csrc/cpu: PROA_FORCE_ISA=ref|avx2|avx512|amx.
"""

from __future__ import annotations

import os
from pathlib import Path

from proa.core.errors import ConfigError

__all__ = [
    "LOG_LEVELS",
    "api_key",
    "base_url",
    "cache_dir",
    "child_environment",
    "log_level",
    "notify_socket",
    "watchdog_interval",
]

LOG_LEVELS = ("debug", "info", "warning", "error")


def cache_dir() -> Path:
    """Directory for files proa can make again. It need not exist yet."""
    if explicit := os.environ.get("PROA_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "proa"


def log_level() -> str:
    """Log level of every process that was given none.

    Raises:
        ConfigError: PROA_LOG_LEVEL is not one of LOG_LEVELS.
    """
    level = os.environ.get("PROA_LOG_LEVEL", "info").lower()
    if level not in LOG_LEVELS:
        raise ConfigError("PROA_LOG_LEVEL", " | ".join(LOG_LEVELS), repr(level), "unset it or name one of these")
    return level


def api_key() -> str | None:
    """API key from the environment, None when unset or empty."""
    return os.environ.get("PROA_API_KEY") or None


def base_url() -> str | None:
    """Server URL for the clients among the commands, None when unset or empty."""
    return os.environ.get("PROA_BASE_URL") or None


def notify_socket() -> str | None:
    """Address systemd wants notifications at, None when this is no such service."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_interval() -> float | None:
    """Seconds within which systemd wants a sign of life of this process, None when it wants none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment for a child, with `extra` set."""
    return {**os.environ, **extra}
