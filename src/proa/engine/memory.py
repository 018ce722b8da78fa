"""How much memory this process may still use."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["available_bytes"]

# Without a limit cgroup v1 reports a number near 2**63.
_NO_LIMIT = 2**60


def available_bytes(root: Path = Path("/")) -> int:
    """The least of MemAvailable, the room left in every memory cgroup around this process (v1 or v2), and RLIMIT_AS.

    Page cache counts as room: it is given up under pressure. `root` is where /proc and /sys are found.
    """
    rooms = [_mem_available(root / "proc/meminfo")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _rooms(root / "sys/fs/cgroup/memory", path, *names)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:  # a shell's `ulimit -v`
        rooms.append(limit - _virtual_bytes(root / "proc/self/status"))
    return max(0, min(rooms))


def _virtual_bytes(path: Path) -> int:
    sizes = [line.split()[1] for line in _read(path).splitlines() if line.startswith("VmSize:")]
    return int(sizes[0]) * 1024 if sizes else 0


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, value, *_ = line.split()
        if name == "MemAvailable:":
            return int(value) * 1024
    raise OSError(f"{path} has no MemAvailable")


def _rooms(mount: Path, group: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """Room in `group` and its parents. Inside a container the path may not exist below the mount; its root does."""
    rooms = []
    directory = mount / group.lstrip("/")
    while True:
        limit, usage = _read(directory / limit_name).strip(), _read(directory / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT:
            statistics = dict(line.split() for line in _read(directory / "memory.stat").splitlines())
            rooms.append(int(limit) - int(usage) + int(statistics.get(cache_name, 0)))
        if directory == mount:
            return rooms
        directory = directory.parent


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
