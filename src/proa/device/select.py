"""Finds a GPU the trunk can run on, and builds the device."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from proa.core.errors import ConfigError
from proa.device.backend import Device
from proa.device.cpu import CpuDevice
from proa.device.gpu import GpuDevice, LinearKernels
from proa.kernels import reference
from proa.native.runtime import CpuRuntime

__all__ = ["Gpu", "choose_gpu", "create_device", "trunk_linears"]

_log = logging.getLogger("proa.device")

# Compute capability from which Triton has bf16 tensor cores.
_LEAST_CAPABILITY = (8, 0)
# What torch says where there is nothing to drive, or nothing shown to this process.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available", "no CUDA-capable device", "not compiled with CUDA")

# What the driver says of a GPU whose memory others hold, or that takes one process at a time.
_TAKEN = ("out of memory", "busy or unavailable")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as found at start. `free_bytes` of `total_bytes` were left, the CUDA context of this process deducted."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)


def choose_gpu(device: Literal["auto", "cpu", "cuda"]) -> Gpu | None:
    """The GPU for the trunk, None for the CPU. `auto` takes the first one and logs why there is none.

    Raises:
        ConfigError: `cuda` is asked for and there is no usable GPU; or there is one, but its driver does not start, or
            others have taken it.
    """
    if device == "cpu":
        return None
    found = _find()
    if isinstance(found, Gpu):
        return found
    if isinstance(found, _FaultyDriver) and any(text in found.text for text in _TAKEN):
        expected, fix = "room for this process on the GPU", "end what else uses it (nvidia-smi), or use --device cpu"
        raise ConfigError("device", expected, found.text, fix)
    if isinstance(found, _FaultyDriver):
        # Not a machine without a GPU: to compute on its CPU, tens of times slower, is nothing to be silent about.
        expected = f"a driver that starts and knows CUDA {torch.version.cuda}, for the GPU that is here"
        raise ConfigError("device", expected, found.text, "update NVIDIA's driver, or use --device cpu")
    if device == "cuda":
        raise ConfigError("device", "a CUDA GPU of compute capability 8.0 or newer", found, "use --device cpu")
    _log.info("the trunk runs on the CPU: %s", found)
    return None


def create_device(gpu: Gpu | None, runtime: CpuRuntime) -> Device:
    """The device of the trunk; experts in RAM and packing use `runtime` either way."""
    if gpu is None:
        return CpuDevice(runtime)
    torch.cuda.set_device(gpu.torch_device)
    if importlib.util.find_spec("triton") is None:
        _log.warning("package triton is missing: the trunk runs on plain torch operations, slowly")
        return GpuDevice(runtime, gpu.torch_device, reference)
    from proa.kernels import trunk  # slow to import

    return GpuDevice(runtime, gpu.torch_device, trunk, linears=trunk_linears())


def trunk_linears() -> LinearKernels:
    """The Triton kernels of linears."""
    from proa.kernels import trunk

    return LinearKernels(trunk.linear, trunk.heads_linear, formats=frozenset(trunk.KINDS), is_fast=trunk.is_fast)


@dataclass(frozen=True, slots=True)
class _FaultyDriver:
    """What it says of itself."""

    text: str


def _find() -> Gpu | _FaultyDriver | str:
    """The first GPU, or why there is none to use."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what the error below says
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            name = torch.cuda.get_device_name(0)
            capability = torch.cuda.get_device_capability(0)
            free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        except (RuntimeError, AssertionError) as error:
            text = str(error).partition("\n")[0].rstrip(".")
            return text if any(absent in text for absent in _NO_GPU) else _FaultyDriver(text)
    if capability < _LEAST_CAPABILITY:
        return f"{name} has compute capability {capability[0]}.{capability[1]}"
    return Gpu(0, name, free_bytes, total_bytes)
