"""The other sides `proa bench experts` can be compared with: plain torch, and kt-kernel."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from proa.cli.bench_experts_data import Inputs, RawExpert
from proa.cli.bench_experts_sides import Setup, Side
from proa.cli.bench_experts_spec import ExpertSpec
from proa.core.errors import ConfigError
from proa.gguf.types import GGML_TYPES
from proa.native import _C
from proa.weights.gguf_blocks import dequantize as dequantize_blocks
from proa.weights.linear import RawLinear
from proa.weights.quantize import dequantize

__all__ = ["KtKernelSide", "TorchSide", "peer_bytes_per_expert", "peer_side"]


def peer_side(name: str, method: str) -> Callable[[Setup], Side]:
    """What builds the side called `name`.

    Raises:
        ConfigError: it is not installed here, or does not have `method`.
    """
    _import("torch")
    if name == "torch":
        return TorchSide
    _divert_native_stdout()
    _kt_class(method)
    return KtKernelSide


def peer_bytes_per_expert(name: str, spec: ExpertSpec) -> int:
    """Memory one expert takes on the side called `name`."""
    return 2 * spec.parameters_per_expert if name == "torch" else spec.bytes_per_expert


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError("--peer", f"an importable {name}", error, "install it, or leave --peer out") from error


def _divert_native_stdout() -> None:
    """kt-kernel's C++ writes to file descriptor 1 until the process ends: sends that to stderr, keeps ours."""
    original = sys.__stdout__
    if original is not None and sys.stdout is original:
        original.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)


_NAMES = ("gate", "up", "down")
# Methods whose weights kt-kernel makes from bf16, with one scale per row.
_KT_QUANTIZES = ("AMXINT8", "AMXINT4")


def _bf16(torch: Any, linear: RawLinear) -> Any:
    if linear.layout == "rows":
        return torch.from_numpy(dequantize(linear)).bfloat16()
    ggml_type = next(known for known in GGML_TYPES.values() if known.name.lower() == linear.format)
    return torch.from_numpy(dequantize_blocks(ggml_type, linear.data)).bfloat16()


class TorchSide:
    """Experts one after the other in bf16: gather their tokens, three GEMMs, scatter. The way models are written."""

    name = "torch"
    kernel = "torch.bf16"

    def __init__(self, setup: Setup) -> None:
        self._torch = torch = _import("torch")
        torch.set_num_threads(setup.threads)
        dims = setup.spec.dims
        shape = (setup.layers, dims.experts)
        self._gate_up = torch.empty(*shape, 2 * dims.intermediate, dims.hidden, dtype=torch.bfloat16)
        self._down = torch.empty(*shape, dims.hidden, dims.intermediate, dtype=torch.bfloat16)
        self.bytes_per_expert = 2 * setup.spec.parameters_per_expert
        count = len(setup.variants)
        for variant, raw in enumerate(setup.variants):
            self._gate_up[:, variant::count, : dims.intermediate] = self._bf16(raw.gate)
            self._gate_up[:, variant::count, dims.intermediate :] = self._bf16(raw.up)
            self._down[:, variant::count] = self._bf16(raw.down)

    def _bf16(self, linear: RawLinear) -> Any:
        return _bf16(self._torch, linear)

    def prepare(self, inputs: Inputs) -> None:
        torch = self._torch
        self._x = torch.from_numpy(inputs.x).bfloat16()
        self._ids = torch.from_numpy(inputs.ids).long()
        self._weights = torch.from_numpy(inputs.weights).bfloat16()

    def call(self, index: int) -> None:
        torch = self._torch
        layer = index % len(self._down)
        ids, weights = self._ids[index % len(self._ids)], self._weights[index % len(self._ids)]
        self._out = torch.zeros_like(self._x)
        for expert in torch.unique(ids).tolist():
            tokens, slots = torch.where(ids == expert)
            both = self._x[tokens] @ self._gate_up[layer, expert].t()
            gate, up = both.chunk(2, dim=1)
            result = (torch.nn.functional.silu(gate) * up) @ self._down[layer, expert].t()
            self._out.index_add_(0, tokens, result * weights[tokens, slots, None])

    def output(self) -> np.ndarray:
        return np.asarray(self._out.float().numpy())


class KtKernelSide:
    """kt-kernel's layer of the same method, from the same weights, on as many threads.

    Its coordinator is one thread more: with a thread per core it competes with the workers.
    """

    name = "kt-kernel"

    def __init__(self, setup: Setup) -> None:
        self._torch = torch = _import("torch")
        package, ext = _import("kt_kernel"), _import("kt_kernel").kt_kernel_ext
        self._moe_class = _kt_class(setup.spec.method.name)
        self.kernel = f"{package.__cpu_variant__}.{self._moe_class.__name__}"
        self.bytes_per_expert = setup.spec.bytes_per_expert
        self._setup = setup
        self._engine = ext.CPUInfer(_kt_pool(ext, setup.threads))
        self._mask = torch.zeros(setup.spec.dims.experts, dtype=torch.bool)
        self._tensors = [_kt_tensors(torch, raw) for raw in setup.variants]
        self._bf16_weights: list[Any] = []
        self._layers = [self._load(index) for index in range(setup.layers)]

    def _load(self, index: int) -> Any:
        dims = self._setup.spec.dims
        config_class = importlib.import_module("kt_kernel_ext.moe").MOEConfig
        config = config_class(dims.experts, dims.top_k, dims.hidden, dims.intermediate, self._mask.data_ptr())
        config.layer_idx, config.pool = index, self._engine.backend_
        config.max_len = max(64, *self._setup.spec.tokens)
        if self._setup.spec.method.name in _KT_QUANTIZES:
            self._give_bf16(config)
        else:
            self._give_stored(config)
        moe = self._moe_class(config)
        order = self._torch.arange(dims.experts, dtype=self._torch.int64)
        self._engine.submit(moe.load_weights_task(order.data_ptr()))
        self._engine.sync()
        self._bf16_weights = []
        return moe

    def _give_bf16(self, config: Any) -> None:
        """All experts in bf16, which it quantizes by rows; kept until the layer is loaded."""
        experts = self._setup.spec.dims.experts
        self._bf16_weights = [
            self._torch.stack([parts[e % len(parts)] for e in range(experts)])
            for parts in ([_bf16(self._torch, getattr(raw, name)) for raw in self._setup.variants] for name in _NAMES)
        ]
        config.gate_proj, config.up_proj, config.down_proj = (weight.data_ptr() for weight in self._bf16_weights)

    def _give_stored(self, config: Any) -> None:
        """Pointers to the stored arrays of every expert."""
        chosen = [self._tensors[expert % len(self._tensors)] for expert in range(self._setup.spec.dims.experts)]
        for position, name in enumerate(_NAMES):
            data = [tensors[position][0].data_ptr() for tensors in chosen]
            scales = [0 if (scale := tensors[position][1]) is None else scale.data_ptr() for tensors in chosen]
            setattr(config, f"{name}_projs", [data])
            setattr(config, f"{name}_scales", [scales])
        method = self._setup.spec.method.name
        if method != "BF16":
            quant = config.quant_config
            quant.bits, quant.group_size = (4, 32) if method == "RAWINT4" else (8, 128)
            quant.zero_point = False

    def prepare(self, inputs: Inputs) -> None:
        torch = self._torch
        self._x = torch.from_numpy(inputs.x).bfloat16()
        self._ids = torch.from_numpy(inputs.ids).long()
        self._weights = torch.from_numpy(inputs.weights)
        self._out = torch.empty_like(self._x)
        self._count = torch.tensor([inputs.num_tokens], dtype=torch.int32)

    def call(self, index: int) -> None:
        moe = self._layers[index % len(self._layers)]
        ids, weights = self._ids[index % len(self._ids)], self._weights[index % len(self._ids)]
        pointers = (ids.data_ptr(), weights.data_ptr(), self._x.data_ptr(), self._out.data_ptr())
        self._engine.submit(moe.forward_task(self._count.data_ptr(), ids.shape[1], *pointers, False))
        self._engine.sync()

    def output(self) -> np.ndarray:
        return np.asarray(self._out.float().numpy())


def _kt_class(method: str) -> Any:
    """kt-kernel's class for `method` on this CPU."""
    _import("kt_kernel")
    amx = _import("kt_kernel.utils.amx")
    choices: dict[str, Callable[[], Any]] = {
        "RAWINT4": lambda: amx._select_rawint4_backend(32),  # noqa: SLF001  # what its own wrapper calls
        "FP8": lambda: amx.AMXFP8_MOE or amx.AVX2FP8_MOE,
        "BF16": lambda: amx.AMXBF16_MOE or amx.AVX2BF16_MOE,
        "AMXINT8": lambda: amx.AMXInt8_MOE,
        "AMXINT4": lambda: amx.AMXInt4_MOE,
    }
    found = choices[method]() if method in choices else None
    if found is None:
        raise ConfigError("--peer", f"a method that kt-kernel has on this CPU ({', '.join(choices)})", method)
    return found


def _kt_pool(ext: Any, threads: int) -> Any:
    """Its worker threads, spread evenly over the NUMA nodes this process may use."""
    nodes = [node["id"] for node in _C.cpu_info()["numa_nodes"] if node["cpus"]][:threads]
    config = ext.WorkerPoolConfig()
    config.subpool_count = len(nodes)
    config.subpool_numa_map = nodes
    config.subpool_thread_count = [threads // len(nodes) + (i < threads % len(nodes)) for i in range(len(nodes))]
    return config


def _kt_tensors(torch: Any, raw: RawExpert) -> list[tuple[Any, Any]]:
    """(data, scales or None) of gate, up, down: the checkpoint's arrays, which is what kt-kernel's raw formats take."""
    return [
        (torch.from_numpy(linear.data), None if linear.scales is None else torch.from_numpy(linear.scales))
        for linear in (raw.gate, raw.up, raw.down)
    ]
