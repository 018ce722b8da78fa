"""Speed of one expert layer: GB/s of the weights it must read and GFLOP/s, beside the measured read bandwidth.

    python benchmarks/kernels/experts.py [--dims 7168x2048x32 2048x768x128] [--formats int4_g32 bf16] [--tokens 1 4 16]
                                         [--threads 16 15] [--seconds 1.0] [--jsonl FILE]

Random weights and uniformly random distinct experts per token. Times are medians over calls with different ids, so the
weights of a call come from memory, not from cache. `cpu ms` is the CPU time of all threads, waiting for each other
included: on a busy machine it is the steadier number. PROA_FORCE_ISA selects the kernels as everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from proa.native import _C

TOP_K = 8


@dataclass(frozen=True, slots=True)
class Result:
    """One measured cell; gigabytes are those of the distinct experts touched."""

    machine: str
    commit: str
    dims: str
    kernel: str
    threads: int
    tokens: int
    calls: int
    median_ms: float
    cpu_ms: float
    gb_per_s: float
    gflop_per_s: float
    read_gb_per_s: float


def raw_linear(rng: np.random.Generator, fmt: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Random checkpoint arrays of a linear [rows, columns] whose outputs stay of order 1."""
    std = columns**-0.5
    if fmt == "int4_g32":
        scales = np.full((rows, columns // 32), std / 4, np.float32)
        return rng.integers(0, 256, (rows, columns // 2), np.uint8), (scales.view(np.uint32) >> 16).astype(np.uint16)
    if fmt == "fp8_block128":
        grid = (-(-rows // 128), -(-columns // 128))
        data = rng.integers(0, 0x48, (rows, columns), np.uint8) | rng.integers(0, 2, (rows, columns), np.uint8) << 7
        return data, np.full(grid, std, np.float32)
    values = rng.standard_normal((rows, columns), np.float32) * np.float32(std)
    if fmt == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16), None
    return values, None


def build(pool: _C.ThreadPool, fmt: str, hidden: int, intermediate: int, experts: int, tokens: int) -> _C.ExpertLayer:
    """A layer whose experts all hold the same values, each in memory of its own."""
    rng = np.random.default_rng(0)
    layer = _C.ExpertLayer(_C.ExpertWorkspace(pool, tokens), experts, hidden, intermediate, fmt, max_top_k=TOP_K)
    gate = raw_linear(rng, fmt, intermediate, hidden)
    up = raw_linear(rng, fmt, intermediate, hidden)
    down = raw_linear(rng, fmt, hidden, intermediate)
    for expert in range(experts):
        layer.load(expert, *gate, *up, *down)
    return layer


def measure(layer: _C.ExpertLayer, hidden: int, tokens: int, seconds: float) -> tuple[float, float, float, int]:
    """(median seconds per call, the same in CPU time, mean number of distinct experts, calls)."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, hidden), np.float32)
    weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
    out = np.empty_like(x)
    times: list[float] = []
    cpu_times: list[float] = []
    distinct: list[int] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 4:
        ids = np.argsort(rng.random((tokens, layer.num_experts)), axis=1)[:, :TOP_K].astype(np.int32)
        start, cpu_start = time.perf_counter(), time.process_time()
        layer.forward(x, ids, weights, out)
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
        distinct.append(len(np.unique(ids)))
    return statistics.median(times[1:]), statistics.median(cpu_times[1:]), statistics.fmean(distinct), len(times)


def run(args: argparse.Namespace) -> Iterator[Result]:
    """Every cell asked for, in order."""
    info = _C.cpu_info()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    for threads, dims in itertools.product(args.threads or [len(info["physical_cpus"])], args.dims):
        cpus = info["physical_cpus"][:threads]
        pool = _C.ThreadPool(cpus)
        hidden, intermediate, experts = (int(part) for part in dims.split("x"))
        for fmt in args.formats:
            layer = build(pool, fmt, hidden, intermediate, experts, max(args.tokens))
            for tokens in args.tokens:
                bandwidth = _C.measure_read_bandwidth(cpus)
                seconds, cpu_seconds, distinct, calls = measure(layer, hidden, tokens, args.seconds)
                flops = 2 * 3 * tokens * TOP_K * hidden * intermediate
                yield Result(
                    machine=info["model_name"],
                    commit=commit.stdout.strip(),
                    dims=dims,
                    kernel=layer.kernel,
                    threads=pool.num_threads,
                    tokens=tokens,
                    calls=calls,
                    median_ms=round(seconds * 1e3, 3),
                    cpu_ms=round(cpu_seconds * 1e3, 3),
                    gb_per_s=round(distinct * layer.nbytes / experts / seconds / 1e9, 2),
                    gflop_per_s=round(flops / seconds / 1e9, 1),
                    read_gb_per_s=round(bandwidth, 1),
                )


def main() -> None:
    """Print a table, and JSON lines when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="+", default=["7168x2048x32", "2048x768x128"], help="HIDDENxINTERxEXPERTS")
    parser.add_argument("--formats", nargs="+", default=["int4_g32", "fp8_block128", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", nargs="+", type=int, help="default: one per core")
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell")
    parser.add_argument("--jsonl", type=Path, help="append results to this file")
    args = parser.parse_args()
    print(
        f"{'dims':>14} {'kernel':>20} {'threads':>7} {'tokens':>6} {'ms':>9} {'cpu ms':>9} {'GB/s':>7} {'of read':>8} "
        f"{'GFLOP/s':>8}"
    )
    for result in run(args):
        share = result.gb_per_s / result.read_gb_per_s
        print(
            f"{result.dims:>14} {result.kernel:>20} {result.threads:>7} {result.tokens:>6} {result.median_ms:>9.2f} "
            f"{result.cpu_ms:>9.2f} {result.gb_per_s:>7.2f} {share:>8.0%} {result.gflop_per_s:>8.1f}",
            flush=True,
        )
        if args.jsonl:
            with args.jsonl.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
