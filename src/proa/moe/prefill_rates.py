"""How fast this machine copies experts and computes them, measured once with experts that are loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertCompute
from proa.moe.prefill_plan import ExpertSize, PrefillRates
from proa.moe.router import TopK
from proa.moe.stream import WeightStream, make_groups
from proa.native._C import CudaDriver
from proa.native.ops import ExpertLayer

__all__ = ["measure_rates"]

# Tokens of an expert on the CPU, as many as an expert of a model gets of chunks of some hundred to some thousand.
CPU_TOKENS = (1, 4, 16, 64, 192)
_REPEATS = 4
_COPIED_BYTES, _COPIED_LAYERS = 4 << 30, 64
_GPU_TOKENS = 4096
_ROWS = 1024


def measure_rates(
    layer: ExpertLayer,
    size: ExpertSize,
    stream: WeightStream,
    driver: CudaDriver,
    compute: ExpertCompute,
    exchange: ExpertExchange,
    *,
    top_k: int,
    max_tokens: int,
) -> PrefillRates:
    """`layer`: pinned, its experts of `size`. `max_tokens`: of a forward of `compute`. Takes about a second."""
    copies = _Copies(layer, stream.arena, driver)
    copied = min(_COPIED_BYTES, _COPIED_LAYERS * layer.nbytes)
    copies.rate(copied // 4)
    stream_bytes = copies.rate(copied)
    points = [count for count in CPU_TOKENS if count <= max_tokens]
    alone, beside, rates = [], [], []
    for count in points:
        experts = _CpuExperts(layer, size, count, top_k)
        alone.append(experts.seconds())
        # Longer than the experts are expected to take; what is copied after them is at the full rate.
        copies.start(int(2 * alone[-1] * _REPEATS * experts.num_experts * stream_bytes))
        started = time.perf_counter()
        beside.append(max(alone[-1], experts.seconds()))
        taken = time.perf_counter() - started
        seconds = copies.seconds()
        rates.append((copies.nbytes - (seconds - taken) * stream_bytes) / taken if taken < seconds else 0.0)
    return PrefillRates(
        stream_bytes=stream_bytes,
        stream_beside_bytes=min(stream_bytes, max(stream_bytes / 2, float(np.median(rates)))),
        row_bytes=_row_rate(exchange, size, top_k, layer.num_experts, stream.arena.device),
        gpu_flops=_gpu_rate(layer, size, stream, compute, top_k, max_tokens),
        cpu_tokens=tuple(float(count) for count in points),
        cpu_s=tuple(alone),
        cpu_beside_s=tuple(beside),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Copies:
    """Copies of a layer's memory to the GPU, over and over."""

    def __init__(self, layer: ExpertLayer, arena: torch.Tensor, driver: CudaDriver) -> None:
        self._arena = arena
        self._driver = driver
        self._pieces = [
            (start + at, min(arena.numel(), nbytes - at))
            for start, nbytes in layer.used_memory
            for at in range(0, nbytes, arena.numel())
        ]
        self._stream: torch.cuda.Stream | None = None
        if arena.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
            self._began, self._ended = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
        self.nbytes = 0
        self._started = 0.0

    def start(self, nbytes: int) -> None:
        """At least so many bytes, once what was queued before is done."""
        assert self._pieces, "a layer with experts in RAM"
        _synchronize(self._arena.device)
        self.nbytes, self._started = 0, time.perf_counter()
        handle = 0
        if self._stream is not None:
            self._began.record(self._stream)
            handle = self._stream.cuda_stream
        while self.nbytes < nbytes:
            for address, size in self._pieces:
                self._driver.copy_to_device(handle, self._arena.data_ptr(), address, size)
                self.nbytes += size
                if self.nbytes >= nbytes:
                    break
        if self._stream is not None:
            self._ended.record(self._stream)

    def seconds(self) -> float:
        """That they have taken, once they are done."""
        if self._stream is None:
            return max(1e-9, time.perf_counter() - self._started)
        self._ended.synchronize()
        return float(1e-3 * self._began.elapsed_time(self._ended))

    def rate(self, nbytes: int) -> float:
        """Bytes per second of so many bytes."""
        self.start(nbytes)
        return self.nbytes / self.seconds()


class _CpuExperts:
    """Forwards of `tokens` tokens that all choose the same `top_k` experts, each time the next ones."""

    def __init__(self, layer: ExpertLayer, size: ExpertSize, tokens: int, top_k: int) -> None:
        rng = np.random.default_rng(0)
        self._layer = layer
        self._x = rng.standard_normal((tokens, size.hidden), np.float32)
        self._out = np.empty_like(self._x)
        loaded = [expert for expert in range(layer.num_experts) if layer.is_loaded(expert)]
        self.num_experts = min(top_k, len(loaded))
        self._sets = np.resize(np.array(loaded, np.int32), (2 * _REPEATS + 1, self.num_experts))
        self._weights = np.full((tokens, self.num_experts), 1.0 / self.num_experts, np.float32)
        self._next = 0

    def seconds(self) -> float:
        """Of one expert, the least of some forwards."""
        times = []
        for _ in range(_REPEATS):
            ids = np.tile(self._sets[self._next % len(self._sets)], (len(self._x), 1))
            self._next += 1
            started = time.perf_counter()
            self._layer.forward(self._x, ids, self._weights, self._out)
            times.append(time.perf_counter() - started)
        return min(times) / self.num_experts


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Of the second of two runs: the first one compiles."""
    taken = 0.0
    for _ in range(2):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        taken = time.perf_counter() - started
    return max(taken, 1e-9)


def _row_rate(exchange: ExpertExchange, size: ExpertSize, top_k: int, experts: int, device: torch.device) -> float:
    rows = min(_ROWS, exchange.max_tokens)
    x = torch.zeros(rows, size.hidden, device=device)
    none = torch.full((rows, top_k), -1, dtype=torch.int32, device=device)
    topk = TopK(none, torch.zeros(rows, top_k, device=device))
    table = torch.full((experts, 1), -1, dtype=torch.int64, device=device)

    def there_and_back() -> None:
        exchange.give(x, topk, table)
        exchange.take(x)

    return 2 * rows * size.row_bytes / _seconds(there_and_back, device)


def _gpu_rate(
    layer: ExpertLayer, size: ExpertSize, stream: WeightStream, compute: ExpertCompute, top_k: int, max_tokens: int
) -> float:
    device, tokens = stream.arena.device, min(_GPU_TOKENS, max_tokens)
    loaded: Sequence[int] = [expert for expert in range(layer.num_experts) if layer.is_loaded(expert)]
    (group, *_) = make_groups(0, layer, loaded, stream.part_bytes // size.nbytes)
    stream.start([group], layer.num_experts, layer.linear_bytes)
    table = stream.wait(0)
    k = min(top_k, len(group.experts))
    chosen = torch.rand(tokens, len(group.experts), device=device).topk(k, dim=1).indices
    ids = torch.full((tokens, top_k), -1, dtype=torch.int32, device=device)
    ids[:, :k] = torch.tensor(group.experts, dtype=torch.int32, device=device)[chosen]
    topk = TopK(ids, torch.full((tokens, top_k), 1.0 / k, device=device))
    x = torch.randn(tokens, size.hidden, device=device)
    out = torch.zeros_like(x)
    taken = _seconds(lambda: compute(x, topk, stream.arena, table, out, accumulate=False), device)
    stream.release()
    return tokens * k * size.flops / taken
