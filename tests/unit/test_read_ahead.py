"""What the reading threads hand out is what the file holds, whatever the order, the window and the faults of a disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from proa.core.errors import CheckpointError
from proa.weights import read_ahead as module
from proa.weights.file_reader import FileReader
from proa.weights.read_ahead import ReadAhead, ReadRange
from proa.weights.staging import SLOT_BYTES, StagingMemory

PAGE = os.sysconf("SC_PAGESIZE")


def ranges_of(path: Path, sizes: list[int], *, keep: tuple[int, ...] = ()) -> list[ReadRange]:
    """A file of random ranges named 0, 1, .. of these sizes, mapped."""
    np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tofile(path)
    mapped = np.memmap(path, np.uint8, "r")
    begins = [0, *np.cumsum(sizes).tolist()]
    return [
        ReadRange(str(index), path, begins[index], mapped[begins[index] : begins[index + 1]], index in keep)
        for index in range(len(sizes))
    ]


@pytest.mark.parametrize("window", [1, 3 * SLOT_BYTES, 64 << 20])
@pytest.mark.parametrize("order", ["as read", "backwards", "shuffled"])
def test_views_hold_the_bytes_of_the_file(tmp_path: Path, window: int, order: str) -> None:
    rng = np.random.default_rng(1)
    sizes = [int(size) for size in rng.choice([1, 16, 5000, 70_000, 900_001, 2_500_000], 40)]
    ranges = ranges_of(tmp_path / "f", sizes, keep=(3, 17))
    wanted = {"as read": ranges, "backwards": ranges[::-1], "shuffled": list(rng.permutation(np.array(ranges)))}[order]
    staged = 0
    with ReadAhead(ranges, window) as reading:
        for item in wanted:
            found = reading.view(item.name)
            if found is not None:
                staged += 1
                assert np.array_equal(found, item.data)
            reading.release(item.name)
        assert reading.view("unknown") is None
        assert reading.view(wanted[0].name) is None  # released
    assert staged == (38 if window == 64 << 20 else staged)


def test_the_window_bounds_what_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXTENT_BYTES", SLOT_BYTES)
    ranges = ranges_of(tmp_path / "f", [SLOT_BYTES] * 10)
    read: list[int] = []
    original = FileReader.read

    def record(self: FileReader, begin: int, into: memoryview) -> int:
        read.append(begin // SLOT_BYTES)
        return original(self, begin, into)

    monkeypatch.setattr(FileReader, "read", record)
    with ReadAhead(ranges, 3 * SLOT_BYTES, num_threads=1) as reading:
        assert reading.view("0") is not None
        assert settled(read, 3) == [0, 1, 2]
        reading.release("0")
        assert settled(read, 4) == [0, 1, 2, 3]
        reading.release("7")  # not wanted any more
        for name in ("1", "2", "3"):
            reading.release(name)
        assert settled(read, 7) == [0, 1, 2, 3, 4, 5, 6]
        assert reading.view("9") is None, "the window is full"
        reading.release("5")
        assert reading.view("9") is not None, "what the loader waits for comes first"
        assert settled(read, 8) == [0, 1, 2, 3, 4, 5, 6, 9]


def settled(read: list[int], count: int) -> list[int]:
    """The list once it has `count` entries, and had time to get more."""
    end = time.monotonic() + 10
    while len(read) < count and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    return read


def test_a_range_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = ranges_of(tmp_path / "f", [50_000])
    go = threading.Event()
    original = FileReader.read

    def slow(self: FileReader, begin: int, into: memoryview) -> int:
        assert go.wait(10)
        return original(self, begin, into)

    monkeypatch.setattr(FileReader, "read", slow)
    with ReadAhead(ranges) as reading:
        threading.Timer(0.05, go.set).start()
        found = reading.view("0")
        assert found is not None
        assert np.array_equal(found, ranges[0].data)


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    ranges = ranges_of(tmp_path / "f", [3 * PAGE, 10 * PAGE])
    os.truncate(tmp_path / "f", 5 * PAGE)
    with (
        ReadAhead(ranges) as reading,
        pytest.raises(
            CheckpointError, match=rf"f: 1\] expected bytes up to {13 * PAGE}, got a file that ends at {5 * PAGE}"
        ),
    ):
        reading.view("1")


def test_mapped_bytes_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says EFAULT where touching a page would be SIGBUS; a loader that asks later learns it."""
    kept = ranges_of(tmp_path / "f", [3 * PAGE], keep=(0,))[0]
    tried = threading.Event()

    def bad(*_: object) -> bool:
        tried.set()
        return False

    monkeypatch.setattr(module, "_populate", bad)
    with ReadAhead([kept]) as reading:
        assert tried.wait(10)
        for thread in reading._threads:
            thread.join()  # an error ends them
        with pytest.raises(CheckpointError, match=r"f: 0\] expected bytes that can be read, got a failing disk"):
            reading.view("0")


def test_the_kernel_tells_pages_that_cannot_be_read(tmp_path: Path) -> None:
    data = ranges_of(tmp_path / "f", [2 * PAGE])[0].data
    assert module._populate(data.ctypes.data, data.nbytes)
    os.truncate(tmp_path / "f", PAGE)
    # Kernels before 5.14, and gVisor's, do not know.
    knows = module._madvise(data.ctypes.data, PAGE, module._MADV_POPULATE_READ) == 0
    assert module._populate(data.ctypes.data, data.nbytes) != knows


def test_a_failing_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = ranges_of(tmp_path / "f", [100])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with (
        ReadAhead(ranges) as reading,
        pytest.raises(CheckpointError, match=r"f: bytes 0\.\.\d+\] .*Input/output error"),
    ):
        reading.view("0")


@pytest.mark.parametrize("refusal", ["open", "read"])
def test_file_systems_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    ranges = ranges_of(tmp_path / "f", [5 * PAGE + 7])
    monkeypatch.setattr("proa.weights.file_reader._is_cached", lambda *_: False)
    open_file, preadv, direct = os.open, os.preadv, set[int]()

    def open_some(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and refusal == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = open_file(path, flags, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def read_some(descriptor: int, *rest: object) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_some)
    monkeypatch.setattr(os, "preadv", read_some)
    with ReadAhead(ranges) as reading:
        found = reading.view("0")
        assert found is not None
        assert np.array_equal(found, ranges[0].data)


def test_staging_memory_is_handed_out_once_and_taken_back() -> None:
    staging = StagingMemory(4 * SLOT_BYTES)
    first, second = staging.take(SLOT_BYTES + 1), staging.take(2 * SLOT_BYTES)
    assert first is not None
    assert second is not None
    assert staging.take(1) is None
    first[:] = b"\1" * len(first)
    second[:] = b"\2" * len(second)
    assert bytes(first[-2:]) == b"\1\1"
    staging.free(first)
    assert staging.take(3 * SLOT_BYTES) is None  # free, but not side by side
    again = staging.take(2 * SLOT_BYTES)
    assert again is not None
    again[:] = b"\3" * len(again)
    assert bytes(second[:2]) == b"\2\2"


PEAK = """
import sys
from pathlib import Path
from proa.weights.checkpoint import Checkpoint
def peak(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
checkpoint = Checkpoint.open(Path(sys.argv[1]))
before = peak()
with checkpoint.read_ahead(24 << 20):
    for index in range(100):
        checkpoint.tensor(f"model.layers.{index}.w").data.sum()
        checkpoint.release(f"model.layers.{index}.w")
print(peak() - before)
"""


def test_memory_grows_by_the_window_only(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(
        {f"model.layers.{i}.w": np.ones((1 << 21) + 8, np.uint8) for i in range(100)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    # The window, and what interpreter and threads take meanwhile.
    assert int(done.stdout) < (24 + 16) << 20
