"""The measuring of `proa bench experts`. Needs numpy and the extension, no terminal library:

    python -m proa.cli.bench_experts_core --method RAWINT4 --model kimi-k2 --experts 32 --json

A cell is one number of tokens. It is timed in rounds: read bandwidth, matrix rate, the peer, ours, again and again, so
that what else the machine does meets all of them alike. Numbers are medians over all calls of a cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from proa import __version__
from proa.cli.bench_experts_data import VARIANTS, Inputs, make_inputs, random_experts
from proa.cli.bench_experts_limits import MatrixRates, ReadRate
from proa.cli.bench_experts_peers import peer_bytes_per_expert, peer_side
from proa.cli.bench_experts_sides import ProaSide, Setup, Side
from proa.cli.bench_experts_spec import METHODS, MODELS, PEERS, ExpertSpec, make_spec, parse_tokens
from proa.core.errors import ConfigError, ProaError
from proa.engine.memory import available_bytes
from proa.native import _C
from proa.native.runtime import CACHE_MULTIPLE, CpuRuntime

__all__ = ["Cell", "ExpertBench", "PeerCell", "fit", "format_cell", "format_header", "main", "measure"]

ROUNDS = 4
# Threads of a side that has just worked spin for a while before they sleep.
COOLDOWN_S = 0.1
MEMORY_SHARE = 0.6
MAX_LAYERS = 64
SUSPECT_DIFFERENCE = 0.05


@dataclass(frozen=True, slots=True)
class PeerCell:
    """The peer's numbers beside ours. `speedup`: its time over ours. `difference`: relative L2 of the two outputs."""

    name: str
    kernel: str
    calls: int
    ms: float
    gb_per_s: float
    tflops: float
    speedup: float
    difference: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of tokens. GB are the checkpoint bytes of the distinct experts touched; `cpu_ms` sums all threads.

    cpu_bandwidth_fraction: `bandwidth_fraction` by CPU time instead of wall time, for a machine that is not idle.
    """

    tokens: int
    kernel: str
    calls: int
    ms: float
    cpu_ms: float
    distinct_experts: float
    gb_per_s: float
    read_gb_per_s: float
    bandwidth_fraction: float
    cpu_bandwidth_fraction: float
    tflops: float
    matrix_tflops: dict[str, float]
    matrix_fraction: float | None
    peer: PeerCell | None


@dataclass(slots=True)
class _Times:
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def fit(spec: ExpertSpec, available: int, l3_bytes: int) -> tuple[ExpertSpec, int, list[str]]:
    """(spec with as many experts as memory holds, number of layers, notes on what was changed).

    Several layers take turns when one of them is not several times larger than the L3 cache.

    Raises:
        ConfigError: not even top_k experts fit.
    """
    dims = spec.dims
    per_expert = spec.bytes_per_expert
    if spec.peer is not None:
        per_expert += peer_bytes_per_expert(spec.peer, spec)
    budget = int(available * MEMORY_SHARE) - VARIANTS * spec.bytes_per_expert
    experts = min(dims.experts, budget // per_expert)
    if experts < dims.top_k:
        needed = (per_expert * dims.top_k + VARIANTS * spec.bytes_per_expert) / MEMORY_SHARE
        raise ConfigError("memory", f"{needed / 1e9:.1f} GB free", f"{available / 1e9:.1f} GB")
    notes = []
    if experts < dims.experts:
        notes.append(f"{experts} experts instead of {dims.experts}: more do not fit in memory")
    wanted = -(-CACHE_MULTIPLE * l3_bytes // (experts * spec.bytes_per_expert))
    layers = max(1, min(wanted, budget // (experts * per_expert), MAX_LAYERS))
    if layers < wanted:
        notes.append("the weights are not much larger than the L3 cache: part of them may be read from there")
    return replace(spec, dims=replace(dims, experts=experts)), layers, notes


class ExpertBench:
    """Builds the sides once, then measures. As a context manager it ends the threads.

    Raises:
        ConfigError: too little memory, more threads than CPUs, or a peer that is not there.
    """

    def __init__(self, spec: ExpertSpec, progress: Callable[[str], None] = lambda _: None) -> None:
        self._info = _C.cpu_info()
        self.spec, self.layers, self.notes = fit(spec, available_bytes(), self._info["caches"]["l3"])
        build_peer = None if spec.peer is None else peer_side(spec.peer, spec.method.name)
        self._runtime = CpuRuntime(spec.threads)
        self.threads = self._runtime.num_threads
        if spec.peer == "kt-kernel" and self.threads >= len(self._info["physical_cpus"]):
            self.notes.append("kt-kernel has one thread more than --threads: leave it a core")
        progress("making random weights")
        setup = Setup(self.spec, self.layers, self.threads, random_experts(self.spec))
        progress(f"packing {self.layers} x {self.spec.dims.experts} experts")
        self._ours = ProaSide(setup, self._runtime)
        self._peer: Side | None = None
        if build_peer is not None:
            progress(f"packing them for {spec.peer}")
            self._peer = build_peer(setup)
        self._read_rate = ReadRate(self._runtime.cpus, self._info["caches"]["l3"])
        self._matrix = MatrixRates(self.threads)
        if self._matrix.note:
            self.notes.append(self._matrix.note)
        self._load_average = os.getloadavg()[0]

    def __enter__(self) -> ExpertBench:
        return self

    def __exit__(self, *error: object) -> None:
        self._runtime.close()

    def cells(self) -> Iterator[Cell]:
        """Measures one number of tokens after the other."""
        for tokens in self.spec.tokens:
            yield self._cell(make_inputs(self.spec.dims, tokens))

    def report(self, cells: list[Cell]) -> dict[str, Any]:
        """The JSON object: {machine, layer, threads, notes, results}."""
        spec = self.spec
        layer = {
            "method": spec.method.name,
            "activations": spec.activations,
            **asdict(spec.dims),
            "layers": self.layers,
        }
        return {
            "version": __version__,
            "machine": {
                **{key: self._info[key] for key in ("vendor", "model_name", "isa", "isa_in_use", "caches")},
                "physical_cpus": len(self._info["physical_cpus"]),
                "numa_nodes": len(self._info["numa_nodes"]),
                "huge_pages": self._info["huge_pages"]["transparent"],
                "load_average": round(self._load_average, 2),
            },
            "layer": {**layer, "bytes_per_expert": spec.bytes_per_expert},
            "threads": self.threads,
            "notes": self.notes,
            "results": [asdict(cell) for cell in cells],
        }

    def _cell(self, inputs: Inputs) -> Cell:
        sides = [side for side in (self._peer, self._ours) if side is not None]
        for side in sides:
            side.prepare(inputs)
            side.call(0)
        difference = _difference(sides[0].output(), self._ours.output())
        times = [_Times() for _ in sides]
        bandwidths, rates = [], []
        for _ in range(ROUNDS):
            bandwidths += self._read_rate.sample()
            rates.append(self._matrix.sample())
            for side, so_far in zip(sides, times, strict=True):
                time.sleep(COOLDOWN_S)
                _time_calls(side, so_far, self.spec.seconds / ROUNDS)
        matrix = {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}
        bandwidth, cpu_bandwidth = (statistics.median(values) for values in zip(*bandwidths, strict=True))
        return self._summary(inputs, times, (bandwidth, cpu_bandwidth), matrix, difference)

    def _summary(
        self,
        inputs: Inputs,
        times: list[_Times],
        bandwidths: tuple[float, float],
        matrix: dict[str, float],
        difference: float,
    ) -> Cell:
        bandwidth, cpu_bandwidth = bandwidths
        tokens, distinct = inputs.num_tokens, inputs.distinct_experts()
        flops = self.spec.flops(tokens)
        ours = times[-1]
        seconds = statistics.median(ours.wall)
        peer = None
        if self._peer is not None:
            peer_seconds = statistics.median(times[0].wall)
            peer = PeerCell(
                name=self._peer.name,
                kernel=self._peer.kernel,
                calls=len(times[0].wall),
                ms=peer_seconds * 1e3,
                gb_per_s=distinct * self._peer.bytes_per_expert / peer_seconds / 1e9,
                tflops=flops / peer_seconds / 1e12,
                speedup=peer_seconds / seconds,
                difference=difference,
            )
            if not difference <= SUSPECT_DIFFERENCE:
                self.notes.append(f"{tokens} tokens: the peer's result differs by {difference:.2g}: not the same work?")
        gb_per_s = distinct * self.spec.bytes_per_expert / seconds / 1e9
        cpu_seconds = statistics.median(ours.cpu)
        return Cell(
            tokens=tokens,
            kernel=self._ours.kernel,
            calls=len(ours.wall),
            ms=seconds * 1e3,
            cpu_ms=cpu_seconds * 1e3,
            distinct_experts=distinct,
            gb_per_s=gb_per_s,
            read_gb_per_s=bandwidth,
            bandwidth_fraction=gb_per_s / bandwidth,
            cpu_bandwidth_fraction=gb_per_s * seconds / cpu_seconds / cpu_bandwidth,
            tflops=flops / seconds / 1e12,
            matrix_tflops=matrix,
            matrix_fraction=flops / seconds / 1e12 / max(matrix.values()) if matrix else None,
            peer=peer,
        )


def _time_calls(side: Side, times: _Times, seconds: float) -> None:
    """Calls `side` for `seconds`, at least once. The first call wakes its threads, so it counts only if alone."""
    begin = time.perf_counter()
    first = len(times.wall)
    gc.disable()
    try:
        while (start := time.perf_counter()) < begin + seconds or len(times.wall) == first:
            cpu_start = time.process_time()
            side.call(len(times.wall))
            times.wall.append(time.perf_counter() - start)
            times.cpu.append(time.process_time() - cpu_start)
    finally:
        gc.enable()
    if len(times.wall) > first + 1:
        del times.wall[first], times.cpu[first]


def _difference(left: np.ndarray, right: np.ndarray) -> float:
    """|left - right| / |right|."""
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


_COLUMNS = (("tokens", 6), ("kernel", 20), ("ms", 9), ("GB/s", 7), ("of read", 7), ("TFLOP/s", 8), ("of matrix", 9))
_PEER_COLUMNS = (("peer ms", 9), ("GB/s", 7), ("TFLOP/s", 8), ("speed-up", 8))


def format_header(peer: str | None) -> str:
    """The line above `format_cell`'s."""
    columns = _COLUMNS + (_PEER_COLUMNS if peer is not None else ())
    return " ".join(f"{name:>{width}}" for name, width in columns)


def format_cell(cell: Cell) -> str:
    """One line of the table; a dash where nothing was measured."""
    matrix = "-" if cell.matrix_fraction is None else f"{cell.matrix_fraction:.0%}"
    texts = [str(cell.tokens), cell.kernel, f"{cell.ms:.2f}", f"{cell.gb_per_s:.1f}", f"{cell.bandwidth_fraction:.0%}"]
    texts += [f"{cell.tflops:.3f}", matrix]
    if cell.peer is not None:
        peer = cell.peer
        texts += [f"{peer.ms:.2f}", f"{peer.gb_per_s:.1f}", f"{peer.tflops:.3f}", f"{peer.speedup:.2f}x"]
    widths = [width for _, width in _COLUMNS + _PEER_COLUMNS]
    return " ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=False))


def measure(bench: ExpertBench, write: Callable[[str], None]) -> list[Cell]:
    """Every cell, each written as a line of a table when it is done, then the notes."""
    spec, dims = bench.spec, bench.spec.dims
    shape = f"{dims.hidden} x {dims.intermediate}, {dims.top_k} of {dims.experts} experts"
    layers = f", {bench.layers} layers in turn" if bench.layers > 1 else ""
    write(f"{spec.method.name} ({spec.method.format}), {shape}{layers}, {bench.threads} threads, medians")
    write(format_header(spec.peer))
    cells = []
    for cell in bench.cells():
        cells.append(cell)
        write(format_cell(cell))
    for note in bench.notes:
        write(f"note: {note}")
    return cells


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line without typer. Exit status 2 for wrong flags, as `proa` has it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="RAWINT4", help=" | ".join(METHODS))
    parser.add_argument("--model", help=" | ".join(MODELS))
    for name in ("hidden", "intermediate", "experts", "top-k", "threads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tokens", default="1,2,4,8,16,64,256,1024")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--expert-activations", dest="activations", default="int8", help="int8 | bf16")
    parser.add_argument("--peer", help=" | ".join(PEERS))
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    try:
        spec = make_spec(**{**given, "tokens": parse_tokens(given["tokens"])})
        with ExpertBench(spec, _write) as bench:
            report = bench.report(measure(bench, _write))
    except ProaError as error:
        _write(f"error: {error}")
        return 2
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
