"""The machine a plan is for: this one, or what is told of another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from proa.core.errors import ConfigError
from proa.device.rates import measured_gpu
from proa.device.select import Gpu, choose_gpu
from proa.engine.memory import available_bytes

__all__ = ["GIB", "Interval", "Machine", "Overrides", "probe"]

GIB = 2**30
_MAX_GIB = 1 << 20
_MAX_GB_S = 1e6


@dataclass(frozen=True, slots=True)
class Interval:
    """A rate or time between two bounds."""

    low: float
    high: float


# 10^12 operations per second and core in products of many tokens, by instruction set: what benchmarks/LOG.md has for
# int4 (16 cores busy; two cores alone), widened downwards for slower clocks.
_CPU_TFLOPS = {"amx": Interval(0.2, 0.5), "avx512": Interval(0.1, 0.45), "avx2": Interval(0.02, 0.2)}
_CPU_TFLOPS_ELSE = Interval(0.0005, 0.02)
# Of a GPU that is not here: a PCIe 4.0 and a 5.0 slot of 16 lanes, a workstation's card and an H200.
_PCIE, _VRAM, _GPU_TFLOPS = Interval(22.0, 57.0), Interval(800.0, 4800.0), Interval(80.0, 800.0)
# What experts and trunk reach of the rates measured of copies and of a large product, at least (benchmarks/LOG.md).
_VRAM_SHARE, _TFLOPS_SHARE = 0.5, 0.2


@dataclass(frozen=True, slots=True)
class Machine:
    """`ram_bytes`, `vram_bytes`: what a server may use, 0 bytes of VRAM for no GPU. Rates: 10^9 bytes per second.

    vram_total_bytes: of the GPU, what others hold included; 0: as many as are free.
    pcie: from pinned memory to the GPU. vram: the GPU's memory. gpu_tflops: bf16 products with many tokens.
    cpu_tflops: of all cores. told: what was not found here but told.
    """

    ram_bytes: int
    read_gb_s: float
    vram_bytes: int = 0
    vram_total_bytes: int = 0
    pcie: Interval = _PCIE
    vram: Interval = _VRAM
    gpu_tflops: Interval = _GPU_TFLOPS
    cpu_tflops: Interval = _CPU_TFLOPS_ELSE
    told: tuple[str, ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """As the engine's plan takes it."""
        if self.vram_bytes == 0:
            return None
        return Gpu(0, "GPU", self.vram_bytes, self.vram_total_bytes or self.vram_bytes)


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the flags tell, None for what is to be found here: GiB and 10^9 bytes per second. `vram` 0: no GPU."""

    vram: float | None = None
    ram: float | None = None
    bandwidth: float | None = None
    pcie: float | None = None

    def __post_init__(self) -> None:
        _check("--vram", self.vram, 0.0, _MAX_GIB)
        _check("--ram", self.ram, 0.01, _MAX_GIB)
        _check("--bandwidth", self.bandwidth, 0.01, _MAX_GB_S)
        _check("--pcie", self.pcie, 0.01, _MAX_GB_S)


def probe(overrides: Overrides, *, rates: bool = True, is_share: bool = False) -> Machine:
    """This machine with `overrides`. `rates`: measure those that are not told, some seconds.

    is_share: GPU memory that is told is a share of this machine's, not another GPU's.
    """
    from proa.native import _C  # here: a help text needs no extension
    from proa.native.runtime import read_bandwidth

    cpu = _C.cpu_info()
    gpu = choose_gpu("auto") if overrides.vram is None or (is_share and overrides.vram) else None
    bandwidth = overrides.bandwidth
    if bandwidth is None:
        bandwidth = read_bandwidth() if rates else 1.0
    measured = measured_gpu(gpu.index) if gpu is not None and rates else None
    cores = len(cpu["physical_cpus"])
    per_core = _CPU_TFLOPS.get(str(cpu["isa_in_use"]), _CPU_TFLOPS_ELSE)
    told = tuple(name for name in ("vram", "ram", "bandwidth", "pcie") if getattr(overrides, name) is not None)
    machine = Machine(
        ram_bytes=available_bytes() if overrides.ram is None else int(overrides.ram * GIB),
        read_gb_s=bandwidth,
        vram_bytes=0 if gpu is None else gpu.free_bytes,
        vram_total_bytes=0 if gpu is None else gpu.total_bytes,
        cpu_tflops=Interval(per_core.low * cores, per_core.high * cores),
        told=told,
    )
    if measured is not None:
        machine = replace(
            machine,
            pcie=Interval(measured.pcie, measured.pcie),
            vram=Interval(_VRAM_SHARE * measured.memory, measured.memory),
            gpu_tflops=Interval(_TFLOPS_SHARE * measured.tflops, measured.tflops),
        )
    if overrides.vram is not None:
        machine = replace(machine, vram_bytes=int(overrides.vram * GIB))
    if overrides.pcie is not None:
        machine = replace(machine, pcie=Interval(overrides.pcie, overrides.pcie))
    return machine


def _check(flag: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(flag, f"a number in {low:g} .. {high:g}", value)
