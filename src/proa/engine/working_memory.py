"""What an engine takes beside weights and KV cache: planned with them, and compared with a run by `proa plan --verify`.

Constants are what runs on an H200 and on CPUs showed (benchmarks/LOG.md, "Planned and measured memory").
"""

from __future__ import annotations

from proa.engine.config import EngineConfig
from proa.engine.device_sampler import BYTES_PER_DRAWN_LOGIT, ROWS_TOGETHER
from proa.models import ExpertInfo, ExpertPlan, GpuBytes, ModelInfo
from proa.moe.cpu_experts import expert_scratch_bytes
from proa.moe.hybrid_layers import MAX_FEW_TOKENS, PASS_ROWS, max_cpu_tokens

__all__ = ["CPU_PROCESS_BYTES", "captured_graphs", "gpu_rows", "host_rows", "running_bytes"]

_MIB = 2**20
# Kernels as they are loaded, of proa, Triton and torch's libraries: what the driver takes beside torch.
_KERNEL_BYTES = 256 * _MIB
# Workspace of cuBLAS, one of the stream that forwards run on.
_CUBLAS_BYTES = 32 * _MIB
# Of a captured decode step beside its logits.
_GRAPH_BYTES = 4 * _MIB
# Interpreter, torch and all else: without and with CUDA and compiled Triton kernels.
CPU_PROCESS_BYTES = 352 * _MIB
_GPU_PROCESS_BYTES = 1728 * _MIB


def captured_graphs(config: EngineConfig) -> int:
    """Decode steps of up to so many sequences are captured."""
    return 0 if config.disable_cuda_graph else min(config.cuda_graph_max_bs, config.requests)


def gpu_rows(config: EngineConfig, model: ModelInfo, needed: GpuBytes) -> dict[str, int]:
    """Bytes of GPU memory by what takes them, in the order in which it is taken; `needed` without its weights."""
    graphs = captured_graphs(config)
    logits = 2 * 4 * model.vocab_size * graphs  # of the largest, and where all leave theirs
    return {
        "workspace": needed.scratch,
        "kernels": _KERNEL_BYTES,
        "CUDA graphs": graphs * _GRAPH_BYTES + logits,
        "running steps": running_bytes(config, model, needed) + _CUBLAS_BYTES,
    }


def running_bytes(config: EngineConfig, model: ModelInfo, needed: GpuBytes) -> int:
    """At most what torch takes at a time while a step runs: in its layers, or where tokens are drawn."""
    drawing = 4 * config.requests + BYTES_PER_DRAWN_LOGIT * min(config.requests, ROWS_TOGETHER)
    return max(needed.transient, model.vocab_size * drawing)


def host_rows(config: EngineConfig, info: ExpertInfo, placed: ExpertPlan, max_tokens: int) -> dict[str, int]:
    """Bytes of RAM beside experts, with the trunk on a GPU. `max_tokens`: of a forward."""
    if not placed.uses_cpu:
        return {"process": _GPU_PROCESS_BYTES}
    # Hidden states to the CPU and results from it, as the strategies of `proa.moe` have them.
    buffers = [max_tokens]
    if placed.stream_from is not None:
        buffers = [min(max(MAX_FEW_TOKENS, placed.stream_from - 1), max_tokens), min(PASS_ROWS, max_tokens)]
    elif not placed.on_gpu.any():
        buffers.append(min(MAX_FEW_TOKENS, max_tokens))
    exchange = sum(2 * (_pinned(rows * 4 * info.hidden) + _pinned(rows * 4 * info.top_k)) for rows in buffers)
    scratch = expert_scratch_bytes(
        max_cpu_tokens(placed, max_tokens), info.hidden, ((info.intermediate, info.top_k),), config.num_threads
    )
    return {"pinned buffers": exchange, "workspace": scratch, "process": _GPU_PROCESS_BYTES}


def _pinned(nbytes: int) -> int:
    """torch takes pinned memory in powers of two."""
    return 1 << max(0, nbytes - 1).bit_length()
