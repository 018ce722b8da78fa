"""Loading a checkpoint cold, beside a plain parallel read of the same files and beside touching as much new memory.

    python benchmarks/serving/loading.py MODEL_DIR [--threads 2] [--rounds 3] [--label NAME] [--jsonl FILE]

They take turns, each in a process of its own with the files out of the page cache before. The plain read is pread of
8 MiB pieces through the page cache by `--threads` threads; the touch writes to fresh huge pages as large as the packed
weights, which no loader can do without and which takes long on virtual machines that give free memory back to their
host. `fraction` is load beside plain read. `--warm` leaves the files in the cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PIECE_BYTES = 8 << 20


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def evict(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read(files: list[Path], threads: int) -> dict[str, float]:
    """Seconds of wall and CPU time to read every byte once."""
    descriptors = {path: os.open(path, os.O_RDONLY) for path in files}
    pieces = iter([(path, begin) for path in files for begin in range(0, path.stat().st_size, PIECE_BYTES)])
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, PIECE_BYTES)
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            os.preadv(descriptors[piece[0]], [buffer], piece[1])

    workers = [threading.Thread(target=work) for _ in range(threads)]
    start, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def touch(nbytes: int, threads: int) -> dict[str, float]:
    """Seconds of wall and CPU time to get `nbytes` of zeroed memory from the system."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    share = nbytes // threads
    workers = [threading.Thread(target=ctypes.memset, args=(address + i * share, 1, share)) for i in range(threads)]
    start, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def load(directory: Path, threads: int) -> dict[str, float]:
    """Seconds to load, resident bytes of weights and scratch, and by how much memory grew at its peak."""
    from proa.models import load_model
    from proa.native.runtime import CpuRuntime
    from proa.weights.checkpoint import Checkpoint

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    runtime = CpuRuntime(threads)
    before = memory("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    model = load_model(Checkpoint.open(directory), runtime, max_tokens=512, max_positions=1024)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    resident = model.weight_bytes + model.workspace_bytes
    return {
        "s": seconds,
        "cpu_s": cpu_seconds,
        "resident_gib": resident / 2**30,
        "peak_over_resident_gib": (memory("VmHWM") - before - resident) / 2**30,
    }


def child(arguments: list[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Alternate the two, print a line per round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--label", default="")
    parser.add_argument("--jsonl", type=Path, help="append the result to this file")
    parser.add_argument("--only", choices=("plain", "touch", "load"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    files = weight_files(args.model)
    nbytes = sum(path.stat().st_size for path in files)
    sides = {
        "plain": lambda: plain_read(files, args.threads),
        "touch": lambda: touch(nbytes, args.threads),
        "load": lambda: load(args.model, args.threads),
    }
    if args.only is not None:
        print(json.dumps(sides[args.only]()))
        return
    gigabytes = nbytes / 1e9
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        one: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        for side in sides:
            if not args.warm:
                evict(files)
            one[side] = child([str(args.model), "--threads", str(args.threads), "--only", side])
        one["fraction"] = one["plain"]["s"] / one["load"]["s"]
        rounds.append(one)
        print(json.dumps(one), flush=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    result = {
        "machine": cpu,
        "commit": commit.stdout.strip(),
        "label": args.label or args.model.name,
        "threads": args.threads,
        "cold": not args.warm,
        "gigabytes": round(gigabytes, 3),
        "plain_gb_per_s": gigabytes / statistics.median(one["plain"]["s"] for one in rounds),
        "touch_gb_per_s": gigabytes / statistics.median(one["touch"]["s"] for one in rounds),
        "load_gb_per_s": gigabytes / statistics.median(one["load"]["s"] for one in rounds),
        "fraction": statistics.median(one["fraction"] for one in rounds),
        "rounds": rounds,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}))
    if args.jsonl:
        with args.jsonl.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
