"""From a checkpoint directory to a model on this machine: everything is planned and refused before weights are read."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from proa.attention.backend import gpu_backend
from proa.chat.grammar.vocabulary import load_vocabulary
from proa.chat.tokenizer_files import TokenizerFiles
from proa.core.errors import UnsupportedError
from proa.device.select import Gpu, choose_gpu, create_device
from proa.engine.build import LoadedModel, Report, max_forward_tokens
from proa.engine.config import EngineConfig
from proa.engine.memory import available_bytes
from proa.engine.pinning import check_pinning
from proa.engine.solve import solve
from proa.kvcache.pool import KVPool
from proa.models import (
    DecodeGraphs,
    ExpertPlan,
    Model,
    ModelInfo,
    ModelNeeds,
    check_expert_method,
    check_gpu_experts,
    inspect,
    load_model,
    model_needs,
    open_experts,
)
from proa.native._C import CudaDriver, CudaError, CudaMissing
from proa.native.runtime import CpuRuntime, read_bandwidth
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
from proa.weights.progress import LoadProgress, LoadStatus

__all__ = ["load_checkpoint", "load_on"]

logger = logging.getLogger("proa.engine")

LOG_INTERVAL_S = 5.0
# From so many bytes of weights the RAM's bandwidth is measured at start.
MEASURED_BYTES = 8 * 2**30
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
# Settings that mean nothing without a GPU.
GPU_SETTINGS = (
    "gpu_experts",
    "gpu_experts_ratio",
    "expert_placement",
    "expert_location",
    "expert_updates",
    "max_deferred_experts",
    "gpu_prefill_threshold",
    "mem_fraction_static",
    "attention_backend",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
)


def load_checkpoint(config: EngineConfig, report: Report) -> LoadedModel:
    """Read the model directory `config.model_path`: the trunk to the device, routed experts to RAM.

    Raises:
        CheckpointError, UnsupportedError, ConfigError: the user has to mend something.
    """
    return load_on(config, choose_gpu(config.device), report)


def load_on(config: EngineConfig, gpu: Gpu | None, report: Report) -> LoadedModel:
    """The same with the trunk on `gpu`, of which no more than its `free_bytes` are used; None: on the CPU."""
    checkpoint = Checkpoint.open(config.model_path)
    inspect(checkpoint)  # refuses what proa cannot run before any file is looked into
    experts = None if config.expert_path is None else open_experts(checkpoint, config.expert_path)
    check_expert_method(checkpoint, config.expert_method, experts)
    load = _load_on_cpu if gpu is None else partial(_load_on_gpu, gpu)
    loaded = load(config, checkpoint, model_needs(checkpoint, experts), experts, report)
    files = TokenizerFiles(Path(config.model_path), None if config.expert_path is None else Path(config.expert_path))
    vocabulary = partial(load_vocabulary, files, loaded.model.vocab_size, loaded.eos_token_ids)
    return replace(loaded, load_vocabulary=vocabulary, read_gb_s=_read_bandwidth(loaded.model.weight_bytes))


def _read_bandwidth(weight_bytes: int) -> float:
    """What the experts' rate is a share of, measured in about a second; 0 for weights too few to be worth it."""
    return read_bandwidth() if weight_bytes >= MEASURED_BYTES else 0.0


def _load_on_cpu(
    config: EngineConfig, checkpoint: Checkpoint, needs: ModelNeeds, experts: ExpertSource | None, report: Report
) -> LoadedModel:
    # The mapped files are page cache and give way.
    available = available_bytes()
    solved = solve(config, needs, None, available)
    unused = _without_gpu(config)
    config, info = solved.config, needs.info
    runtime = CpuRuntime(config.num_threads)
    model = _load(config, None, runtime, checkpoint, experts, solved.kv.max_model_len, report, "cpu")
    notes = {**solved.notes, **_info(config, info, runtime), "device": "cpu", **unused}
    return LoadedModel(
        model, info.layout, solved.kv, info.eos_token_ids, notes, usage=model.expert_usage, config=config
    )


def _load_on_gpu(
    gpu: Gpu,
    config: EngineConfig,
    checkpoint: Checkpoint,
    needs: ModelNeeds,
    experts: ExpertSource | None,
    report: Report,
) -> LoadedModel:
    config, notes = _without_gpu_experts(config, checkpoint, experts)
    solved = solve(config, needs, gpu, available_bytes())
    config, placed, plan, info = solved.config, solved.placed, solved.kv, needs.info
    assert placed is not None
    if placed.stream_all or placed.moves:
        away = int(placed.on_gpu.sum()) / max(1, placed.on_gpu.size)
        check_pinning(CudaDriver(), int(needs.expert_bytes * (1 - away)))
    # One core for the thread that launches: threads of the experts stay awake during a step.
    runtime = CpuRuntime(config.num_threads, spare=1)
    attention, notes["attention_backend"] = gpu_backend(config.attention_backend)
    model = _load(config, gpu, runtime, checkpoint, experts, plan.max_model_len, report, attention, placed)
    notes = {**solved.notes, **_info(config, info, runtime), **notes}
    capture, most = None, min(config.cuda_graph_max_bs, config.requests)
    if config.disable_cuda_graph:
        notes["cuda_graphs"] = "none, as asked for"
    elif model.is_capturable:
        capture, notes["cuda_graphs"] = partial(_capture, model, most), f"decode steps of 1 to {most} sequences"
    else:
        notes["cuda_graphs"] = "none: attention or experts are waited for between kernels"
    return LoadedModel(
        model, info.layout, plan, info.eos_token_ids, notes, gpu.torch_device, capture, usage=model.expert_usage,
        config=config, running_bytes=solved.running_bytes,
    )  # fmt: skip


def _without_gpu(config: EngineConfig) -> dict[str, str]:
    """What is said of those that were given."""
    given = [name for name in GPU_SETTINGS if getattr(config, name) != _DEFAULTS[name]]
    notes = dict.fromkeys(given, "not used: the trunk runs on the CPU")
    if "cuda_graph_max_bs" in notes and config.max_running_requests is None:
        notes["cuda_graph_max_bs"] = "no graphs: the trunk runs on the CPU; bounds --max-running-requests"
    return notes


def _without_gpu_experts(
    config: EngineConfig, checkpoint: Checkpoint, experts: ExpertSource | None
) -> tuple[EngineConfig, dict[str, str]]:
    """`config` with all experts in RAM where nobody asked for others and the GPU cannot compute them, and why.

    Raises:
        UnsupportedError: it was asked to, and cannot.
    """
    try:
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError("GPU experts", "the package triton", "none")
        check_gpu_experts(checkpoint, experts)
        CudaDriver()
    except (UnsupportedError, CudaMissing, CudaError) as error:
        asked = config.gpu_experts_ratio or config.gpu_experts or config.gpu_prefill_threshold
        if asked and isinstance(error, UnsupportedError):
            raise
        if asked:
            raise UnsupportedError("GPU experts", "a CUDA driver that hands over", error) from error
        config = msgspec.structs.replace(config, gpu_experts=0, gpu_prefill_threshold=0)
        return config, {"experts": f"all in RAM: {error}"}
    return config, {}


def _capture(model: Model, max_batch: int, pool: KVPool, max_blocks: int) -> DecodeGraphs:
    with torch.inference_mode():
        return DecodeGraphs(model, pool, max_batch=max_batch, max_blocks=max_blocks)


def _load(
    config: EngineConfig,
    gpu: Gpu | None,
    runtime: CpuRuntime,
    checkpoint: Checkpoint,
    experts: ExpertSource | None,
    max_positions: int,
    report: Report,
    attention: str,
    expert_plan: ExpertPlan | None = None,
) -> Model:
    return load_model(
        checkpoint,
        runtime,
        max_tokens=max_forward_tokens(config),
        max_positions=max_positions,
        progress=_progress(report),
        experts=experts,
        expert_activations=config.expert_activations,
        device=create_device(gpu, runtime),
        attention=attention,
        expert_plan=expert_plan,
    )


def _info(config: EngineConfig, model_info: ModelInfo, runtime: CpuRuntime) -> dict[str, str]:
    return {
        "family": model_info.family,
        "num_threads": str(runtime.num_threads),
        "expert_activations": config.expert_activations,
    }


def _progress(report: Report) -> LoadProgress:
    """Hands every step on and logs some."""
    logged = LoadStatus(0, 0, 0.0)

    def on_progress(status: LoadStatus) -> None:
        nonlocal logged
        report(status.done_bytes, status.total_bytes)
        is_late = status.elapsed_s - logged.elapsed_s >= LOG_INTERVAL_S or status.done_bytes >= status.total_bytes
        if is_late and status.done_bytes > logged.done_bytes:
            logged = status
            logger.info("%s", status)

    return LoadProgress(on_progress)
