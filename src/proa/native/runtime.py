"""The CPU resources of an engine process."""

from __future__ import annotations

import logging
from types import TracebackType

from proa.core.errors import ConfigError
from proa.native import _C

__all__ = ["CpuRuntime"]

_log = logging.getLogger("proa.native")


class CpuRuntime:
    """Owns the pinned thread pool all native operators of a process run on. Built once, by the engine.

    `num_threads`: None takes one thread per physical core this process may use (affinity, cgroup cpuset and quota).
    More than that first takes the other hardware threads of the cores. `cpus`: where the threads run.

    Raises:
        ConfigError: more threads than CPUs this process may use, or fewer than one.
    """

    __slots__ = ("cpus", "num_threads", "pool")

    def __init__(self, num_threads: int | None = None) -> None:
        info = _C.cpu_info()
        physical = info["physical_cpus"]
        cpus = physical + [entry["cpu"] for entry in info["cpus"] if entry["cpu"] not in physical]
        count = len(physical) if num_threads is None else num_threads
        if not 1 <= count <= len(cpus):
            raise ConfigError("threads", f"1 to {len(cpus)} threads (CPUs this process may use)", count)
        self.cpus = cpus[:count]
        self.pool = _C.ThreadPool(self.cpus)
        self.num_threads = count
        _log.info("%d threads on CPUs %s, ISA %s", count, self.cpus, info["isa_in_use"])

    def close(self) -> None:
        """Ends the threads. Operators given the pool afterwards raise ValueError."""
        self.pool.close()

    def __enter__(self) -> CpuRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
