"""The CPU resources of an engine process."""

from __future__ import annotations

import logging
from types import TracebackType

from proa.core.errors import ConfigError
from proa.native import _C

__all__ = ["CACHE_MULTIPLE", "CpuRuntime", "probe_mebibytes", "read_bandwidth"]

_log = logging.getLogger("proa.native")

# What is read in turn is this many times the L3 cache, so that little of it is found there.
CACHE_MULTIPLE = 4
MIN_PROBE_MIB = 512
MAX_PROBE_MIB = 4096


def probe_mebibytes(l3_bytes: int) -> int:
    """How much has to be read to measure memory and not the L3 cache."""
    return min(max(CACHE_MULTIPLE * l3_bytes >> 20, MIN_PROBE_MIB), MAX_PROBE_MIB)


def read_bandwidth() -> float:
    """10^9 bytes per second that all cores this process may use read from memory; takes about a second."""
    cpu = _C.cpu_info()
    return float(_C.measure_read_bandwidth(list(cpu["physical_cpus"]), probe_mebibytes(int(cpu["caches"]["l3"]))))


class CpuRuntime:
    """Owns the pinned thread pool all native operators of a process run on. Built once, by the engine.

    `num_threads`: None takes one thread per physical core this process may use (affinity, cgroup cpuset and quota), but
    leaves `spare` of them to others. Fewer are spread over the NUMA nodes; more take the other hardware threads of the
    cores too. `cpus`: where the threads run. Weights of experts lie on the node whose threads multiply them.

    Raises:
        ConfigError: more threads than CPUs this process may use, or fewer than one.
    """

    __slots__ = ("cpus", "num_threads", "pool")

    def __init__(self, num_threads: int | None = None, *, spare: int = 0) -> None:
        info = _C.cpu_info()
        available = len(info["cpus"])
        count = max(1, len(info["physical_cpus"]) - spare) if num_threads is None else num_threads
        if not 1 <= count <= available:
            raise ConfigError("threads", f"1 to {available} threads (CPUs this process may use)", count)
        workers = _C.worker_cpus(count)
        self.cpus = [cpu for cpu, _ in workers]
        self.pool = _C.ThreadPool(self.cpus, [node for _, node in workers])
        self.num_threads = count
        nodes = self.pool.num_nodes
        _log.info("%d threads on CPUs %s, %d NUMA nodes, ISA %s", count, self.cpus, nodes, info["isa_in_use"])

    def close(self) -> None:
        """Ends the threads. Operators given the pool afterwards raise ValueError."""
        self.pool.close()

    def __enter__(self) -> CpuRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
