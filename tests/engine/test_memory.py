from __future__ import annotations

from pathlib import Path

import pytest

from proa.engine.memory import available_bytes


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    assert 2**20 < available_bytes() < 2**50


def test_without_cgroups(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {})) == 8000 * 1024


@pytest.mark.parametrize(
    ("own", "parent", "expected"),
    [("max", "max", 8000 * 1024), ("5000", "max", 5000 - 1000 + 300), ("5000", "2000", 2000 - 900 + 100)],
)
def test_cgroup_v2_takes_the_tightest_level(tmp_path: Path, own: str, parent: str, expected: int) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": own + "\n",
        "sys/fs/cgroup/a/b/memory.current": "1000\n",
        "sys/fs/cgroup/a/b/memory.stat": "anon 700\ninactive_file 300\n",
        "sys/fs/cgroup/a/memory.max": parent + "\n",
        "sys/fs/cgroup/a/memory.current": "900\n",
        "sys/fs/cgroup/a/memory.stat": "inactive_file 100\n",
    }
    assert available_bytes(machine(tmp_path, files)) == expected


def test_cgroup_v1_in_a_container_whose_path_is_not_mounted(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "6000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1500\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 2500


def test_cgroup_v1_without_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 8000 * 1024


def test_over_the_limit_is_zero(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "200\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 0


def test_a_limit_of_addresses_is_one_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"proc/self/status": "VmPeak:\t  900 kB\nVmSize:\t  700 kB\n"}
    monkeypatch.setattr("proa.engine.memory.resource.getrlimit", lambda _: (1000 * 1024, -1))
    assert available_bytes(machine(tmp_path, files)) == 300 * 1024
