"""The extension's loader, the CPU description, the thread pool and its owner."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proa.core.errors import ConfigError
from proa.native import _C, load_extension, ops
from proa.native.runtime import CpuRuntime


def test_a_missing_extension_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"expected the compiled extension proa\.native\._C.*Fix: build it"):
        load_extension()


def test_an_extension_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(__version__="0.0.0"))
    with pytest.raises(ConfigError, match=r"expected extension version .*, got 0\.0\.0"):
        load_extension()


def test_cpu_info_describes_this_process() -> None:
    info = _C.cpu_info()
    cpus = [entry["cpu"] for entry in info["cpus"]]
    assert set(cpus) == os.sched_getaffinity(0)
    assert info["physical_cpus"]
    assert set(info["physical_cpus"]) <= set(cpus)
    assert {cpu for node in info["numa_nodes"] for cpu in node["cpus"]} == set(cpus)
    assert sum(node["mem_bytes"] for node in info["numa_nodes"]) > 0
    assert info["isa_in_use"] in ("ref", "avx2", "avx512", "amx")


def test_read_bandwidth_is_positive() -> None:
    assert _C.measure_read_bandwidth(_C.cpu_info()["physical_cpus"], mebibytes=8) > 0


@pytest.mark.parametrize("cpus", [[], [-1], [10**6], [2**31 - 1]])
def test_only_allowed_cpus_are_taken(cpus: list[int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        _C.ThreadPool(cpus)
    with pytest.raises(ValueError, match="expected"):
        _C.measure_read_bandwidth(cpus, 8)


@pytest.mark.parametrize("mebibytes", [0, -1, 2**30])
def test_bandwidth_memory_is_bounded(mebibytes: int) -> None:
    with pytest.raises(ValueError, match="mebibytes"):
        _C.measure_read_bandwidth(_C.cpu_info()["physical_cpus"], mebibytes)


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_runtime_refuses_thread_counts(threads: int) -> None:
    with pytest.raises(ConfigError, match="threads"):
        CpuRuntime(threads)


def test_threads_take_cores_first_and_stay_within_the_cpus_allowed() -> None:
    info = _C.cpu_info()
    node_of = {entry["cpu"]: entry["node"] for entry in info["cpus"]}
    with CpuRuntime() as runtime:
        assert sorted(runtime.cpus) == sorted(info["physical_cpus"])
        assert runtime.pool.num_nodes == len({node_of[cpu] for cpu in runtime.cpus})
    chosen = _C.worker_cpus(10_000)
    assert dict(chosen) == node_of and len(chosen) == len(node_of)
    with pytest.raises(ValueError, match=r"\[worker_cpus\] expected count"):
        _C.worker_cpus(0)


def test_pool_refuses_nodes_that_do_not_fit() -> None:
    cpu = _C.cpu_info()["cpus"][0]["cpu"]
    with pytest.raises(ValueError, match=r"expected a node for each of the 2 CPUs, got 1"):
        _C.ThreadPool([cpu] * 2, [0])
    with pytest.raises(ValueError, match=r"expected at most 64 nodes"):
        _C.ThreadPool([cpu] * 65, list(range(65)))


def test_closing_ends_the_threads() -> None:
    def native_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = native_threads()
    cpu = _C.cpu_info()["cpus"][0]["cpu"]
    pool = _C.ThreadPool([cpu] * 5)
    assert native_threads() == before + 4
    pool.close()
    assert native_threads() == before
    with pytest.raises(ValueError, match="open pool"):
        _ = pool.num_threads


def test_python_threads_may_share_a_pool(pool: ops.ThreadPool) -> None:
    x, weight = torch.randn(600, 128), torch.randn(128)
    expected = torch.empty_like(x)
    ops.rms_norm(pool, x, weight, 1e-5, expected)
    results = [torch.empty_like(x) for _ in range(4)]

    def work(out: torch.Tensor) -> None:
        for _ in range(20):
            out.zero_()
            ops.rms_norm(pool, x, weight, 1e-5, out)

    threads = [threading.Thread(target=work, args=(out,)) for out in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, expected) for out in results)


def test_torch_without_the_dlpack_exchange_table(pool: ops.ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    src, slots = torch.randn(3, 8), torch.tensor([2, 0, 1], dtype=torch.int32)
    expected, cache = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(3, 8, dtype=torch.bfloat16)
    ops.kv_store(pool, src, expected, slots)
    monkeypatch.setattr(ops, "_TAKES_TENSORS", False)
    ops.kv_store(pool, src, cache, slots)
    assert torch.equal(cache, expected)
