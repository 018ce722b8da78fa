# The extension's name and its argument names are fixed in C++.
# ruff: noqa: A002, N999

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

import numpy as np
import torch

__version__: str

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]

# What kernels may round activations to where others run. "trunk": not to one bf16 number, "int8": to anything,
# "bf16": not to int8.
Activations: TypeAlias = Literal["trunk", "int8", "bf16"]

class RawLinear(Protocol):
    """The attributes of `proa.weights.linear.RawLinear` that packing reads."""

    @property
    def format(self) -> str: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def data(self) -> Array: ...
    @property
    def scales(self) -> Array | None: ...
    @property
    def global_scale(self) -> float: ...
    @property
    def layout(self) -> str: ...

class Cpu(TypedDict):
    cpu: int
    core: int
    socket: int
    node: int

class Caches(TypedDict):
    l1d: int
    l2: int
    l3: int

class NumaNode(TypedDict):
    id: int
    cpus: list[int]
    mem_bytes: int

class HugePages(TypedDict):
    transparent: str
    page_bytes: int
    reserved_free: int

class CpuInfo(TypedDict):
    vendor: str
    model_name: str
    isa: list[str]
    isa_in_use: str
    cpus: list[Cpu]
    physical_cpus: list[int]
    cpu_quota: float
    caches: Caches
    numa_nodes: list[NumaNode]
    huge_pages: HugePages

class KernelReport(TypedDict):
    name: str
    chosen: bool
    reason: str

def cpu_info() -> CpuInfo: ...
def worker_cpus(count: int) -> list[tuple[int, int]]: ...
def measure_read_bandwidth(cpus: Sequence[int], mebibytes: int = 512) -> float: ...
def weight_formats() -> list[str]: ...
def packed_bytes(format: str, out_features: int, in_features: int) -> int: ...
def kernel_report(
    format: str, out_features: int, in_features: int, activations: Activations = "trunk"
) -> list[KernelReport]: ...

class ReadProbe:
    def __init__(self, cpus: Sequence[int], mebibytes: int) -> None: ...
    def measure(self) -> float: ...

class ThreadPool:
    def __init__(self, cpus: Sequence[int], nodes: Sequence[int] = ...) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    def close(self) -> None: ...

class PackedWeight:
    @staticmethod
    def pack(pool: ThreadPool, linear: RawLinear, activations: Activations = "trunk") -> PackedWeight: ...
    @property
    def format(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def packed(self) -> np.ndarray[Any, Any]: ...
    def dequantize(self) -> np.ndarray[Any, Any]: ...

class ExpertWorkspace:
    def __init__(self, pool: ThreadPool, max_tokens: int = 512) -> None: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Prefault:
    def wait(self) -> None: ...

class ExpertLayer:
    def __init__(
        self,
        workspace: ExpertWorkspace,
        num_experts: int,
        hidden: int,
        intermediate: int,
        format: str,
        activation: str = "silu",
        max_top_k: int = 8,
        activations: Activations = "int8",
        limit: float = ...,
        alpha: float = 1.0,
        bias: bool = False,
        down_format: str | None = None,
    ) -> None: ...
    def load(self, expert: int, gate: RawLinear, up: RawLinear, down: RawLinear) -> None: ...
    def forward(self, x: Array, ids: Array, weights: Array, out: Array, accumulate: bool = False) -> None: ...
    def is_loaded(self, expert: int) -> bool: ...
    def blocks(self, expert: int) -> list[tuple[int, int]]: ...
    def reserve(self, expert: int) -> None: ...
    def commit(self, expert: int) -> None: ...
    def drop(self, expert: int) -> None: ...
    def release_memory(self) -> None: ...
    def prefault(self, count: int) -> Prefault: ...
    @property
    def spare_slots(self) -> int: ...
    @property
    def used_memory(self) -> list[tuple[int, int]]: ...
    @property
    def linear_bytes(self) -> tuple[int, int, int]: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def formats(self) -> tuple[str, str]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_per_expert(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def kernel(self) -> str: ...

def linear(
    pool: ThreadPool,
    x: Array,
    weight: PackedWeight,
    out: Array,
    bias: Array | None = None,
    accumulate: bool = False,
) -> None: ...
def heads_linear(pool: ThreadPool, x: Array, weights: Sequence[PackedWeight], out: Array) -> None: ...
def route(
    pool: ThreadPool,
    logits: Array,
    ids: Array,
    weights: Array,
    bias: Array | None = None,
    score: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    counts: Array | None = None,
) -> None: ...
def rms_norm(pool: ThreadPool, x: Array, weight: Array, eps: float, out: Array) -> None: ...
def add_rms_norm(pool: ThreadPool, residual: Array, delta: Array, weight: Array, eps: float, out: Array) -> None: ...
def rope(
    pool: ThreadPool,
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    offset: int = 0,
    interleaved: bool = False,
) -> None: ...
def kv_store(pool: ThreadPool, src: Array, cache: Array, slots: Array) -> None: ...
def paged_attention(
    pool: ThreadPool,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    block_size: int,
    sequence_ids: Array,
    positions: Array,
    scale: float,
    out: Array,
) -> None: ...
def embedding_rows(pool: ThreadPool, table: Array, ids: Array, out: Array) -> None: ...
def quantize(
    source: str,
    data: Array,
    scales: Array | None,
    target: str,
    out_data: Array,
    out_scales: Array | None,
) -> tuple[float, float, float, bool]: ...
def xxh64(data: Array) -> int: ...

class CudaMissing(Exception): ...  # noqa: N818  # says what it is
class CudaError(Exception): ...

class CudaDriver:
    def __init__(self, library: str = "libcuda.so.1") -> None: ...
    @property
    def version(self) -> int: ...
    def pin(self, ranges: Sequence[tuple[int, int]], num_threads: int = 1) -> None: ...
    def unpin(self, start: int) -> None: ...
    def device_address(self, start: int) -> int: ...
    def copy_to_device(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...
    def copy_to_host(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...

class StreamWorker:
    def __init__(
        self,
        driver: CudaDriver,
        pool: ThreadPool,
        cpu: int = -1,
        hand_over: Literal["memory", "host_function"] = "memory",
        max_jobs: int = 4096,
    ) -> None: ...
    def add(
        self,
        layer: ExpertLayer,
        x: Array,
        ids: Array,
        weights: Array,
        out: Array,
        tokens: Array,
        accumulate: bool = False,
    ) -> int: ...
    def submit(self, stream: int, job: int) -> None: ...
    def wait(self, stream: int, job: int) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    @property
    def finished(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def faults(self) -> int: ...
