"""Speed of the trunk operators: overhead of a call, and attention's GFLOP/s and GB/s of keys and values.

    python benchmarks/kernels/trunk_ops.py [--threads N] [--seconds 0.5] [--jsonl FILE]

Times are the best of many calls. Decode cells walk over caches of several layers, so that keys and values come from
memory; the measured read bandwidth of the same CPUs stands beside them. PROA_FORCE_ISA selects the kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from proa.native import _C, ops
from proa.native.runtime import CpuRuntime

CACHE_BYTES = 128 << 20  # of all layers of a cell together: beyond the last-level cache of small machines
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def latent(self) -> bool:
        return self.key_dim > self.value_dim and self.kv_heads == 1


SHAPES = (
    Shape("gqa 9/3 x 64", 9, 3, 64, 64),
    Shape("gqa 32/4 x 128", 32, 4, 128, 128),
    Shape("gqa 32/4 x 128 bf16", 32, 4, 128, 128, torch.bfloat16),
    Shape("mha 32 x 128", 32, 32, 128, 128),
    Shape("mla 64 x 576", 64, 1, 576, 512),
)
BATCHES = {"prefill 512": (0, 512), "decode at 8000": (7999, 1)}  # (cached positions, new tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """One measured cell; the rates are 0 where they mean nothing."""

    machine: str
    isa: str
    threads: int
    cell: str
    best_us: float
    gflop_per_s: float
    gb_per_s: float
    read_gb_per_s: float


def best_seconds(call: Callable[[], None], seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def overheads(pool: ops.ThreadPool, seconds: float) -> Iterator[tuple[str, float]]:
    """(operator, microseconds) of calls on one token, which compute next to nothing."""
    x, weight, out = torch.randn(1, 64), torch.ones(64), torch.empty(1, 64)
    heads, tables, zero = torch.randn(1, 1, 64), torch.ones(1, 32), torch.zeros(1, dtype=torch.int32)
    cache, attended = torch.zeros(16, 1, 64), torch.empty(1, 1, 64)
    rows, table = cache.flatten(1), zero[None]
    calls: dict[str, Callable[[], None]] = {
        "rms_norm": lambda: ops.rms_norm(pool, x, weight, 1e-5, out),
        "add_rms_norm": lambda: ops.add_rms_norm(pool, x, out, weight, 1e-5, out),
        "rope": lambda: ops.rope(pool, heads, tables, tables, zero),
        "kv_store": lambda: ops.kv_store(pool, x, rows, zero),
        "embedding_rows": lambda: ops.embedding_rows(pool, x, zero, out),
        "paged_attention": lambda: ops.paged_attention(pool, heads, cache, cache, table, 16, zero, zero, 1.0, attended),
    }
    for name, call in calls.items():
        yield name, 1e6 * best_seconds(lambda call=call: [call() for _ in range(100)], seconds) / 100  # type: ignore[misc]


def attention(pool: ops.ThreadPool, shape: Shape, past: int, tokens: int, seconds: float) -> tuple[float, float, float]:
    """(seconds, floating point operations, cache bytes) of one call."""
    blocks = -(-(past + tokens) // BLOCK_SIZE)
    width = shape.key_dim + (0 if shape.latent else shape.value_dim)
    layer_bytes = blocks * BLOCK_SIZE * shape.kv_heads * width * shape.dtype.itemsize
    layers = max(1, CACHE_BYTES // layer_bytes) if tokens == 1 else 1
    keys = torch.randn(layers, blocks * BLOCK_SIZE, shape.kv_heads, shape.key_dim).to(shape.dtype)
    values = keys[..., : shape.value_dim] if shape.latent else torch.randn_like(keys[..., : shape.value_dim])
    query, out = torch.randn(tokens, shape.heads, shape.key_dim), torch.empty(tokens, shape.heads, shape.value_dim)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    ids, positions = torch.zeros(tokens, dtype=torch.int32), torch.arange(past, past + tokens, dtype=torch.int32)
    scale = shape.key_dim**-0.5

    def call() -> None:
        for key, value in zip(keys, values, strict=True):
            ops.paged_attention(pool, query, key, value, table, BLOCK_SIZE, ids, positions, scale, out)

    pairs = tokens * past + tokens * (tokens + 1) // 2
    flop = 2.0 * pairs * shape.heads * (shape.key_dim + shape.value_dim)
    return best_seconds(call, seconds) / layers, flop, layer_bytes * (past + tokens) / (blocks * BLOCK_SIZE)


def measure(runtime: CpuRuntime, seconds: float) -> Iterator[Result]:
    info = _C.cpu_info()
    read = _C.measure_read_bandwidth(info["physical_cpus"][: runtime.num_threads], 256)
    common = (info["model_name"], info["isa_in_use"], runtime.num_threads)
    for name, microseconds in overheads(runtime.pool, seconds):
        yield Result(*common, f"call {name}", microseconds, 0, 0, read)
    for shape in SHAPES:
        for batch, (past, tokens) in BATCHES.items():
            elapsed, flop, nbytes = attention(runtime.pool, shape, past, tokens, seconds)
            rates = (flop / elapsed / 1e9, nbytes / elapsed / 1e9 if tokens == 1 else 0)
            yield Result(*common, f"{batch}: {shape.name}", elapsed * 1e6, *rates, read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--jsonl", type=Path, help="append one JSON object per cell")
    args = parser.parse_args()
    print(f"{'cell':40} {'best us':>10} {'GFLOP/s':>8} {'GB/s':>6}  of read GB/s")
    with CpuRuntime(args.threads) as runtime:
        for r in measure(runtime, args.seconds):
            print(f"{r.cell:40} {r.best_us:10.2f} {r.gflop_per_s:8.1f} {r.gb_per_s:6.1f}  {r.read_gb_per_s:.1f}")
            if args.jsonl is not None:
                with args.jsonl.open("a") as file:
                    file.write(json.dumps(asdict(r)) + "\n")


if __name__ == "__main__":
    main()
