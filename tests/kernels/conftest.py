from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.fake_cuda import build_fake_driver

from proa.native import _C
from proa.native.ops import ThreadPool
from proa.native.runtime import CpuRuntime


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The references are small: torch's own threads would only get in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> _C.CudaDriver:
    """A CUDA driver whose memory is the host's."""
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPool]:
    """As many threads as there are cores."""
    with CpuRuntime() as runtime:
        yield runtime.pool


@pytest.fixture(scope="session")
def single() -> Iterator[ThreadPool]:
    """One thread."""
    with CpuRuntime(1) as runtime:
        yield runtime.pool


@pytest.fixture(scope="session")
def crowd() -> Iterator[ThreadPool]:
    """Three threads on one CPU: works anywhere, and hands out work in an order of its own."""
    crowded = ThreadPool([_C.cpu_info()["cpus"][0]["cpu"]] * 3)
    yield crowded
    crowded.close()
