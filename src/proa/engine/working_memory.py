"""What an engine takes beside weights and KV cache: planned with them, and compared with a run by `proa plan --verify`.

Constants are what runs on an H200 and on CPUs showed (benchmarks/LOG.md, "Planned and measured memory").
"""

from __future__ import annotations

from proa.engine.config import EngineConfig
from proa.models import ExpertInfo, ExpertPlan, GpuBytes, ModelInfo
from proa.moe.cpu_experts import expert_scratch_bytes
from proa.moe.hybrid_layers import MAX_FEW_TOKENS, PASS_ROWS

__all__ = ["CPU_PROCESS_BYTES", "captured_graphs", "gpu_rows", "host_rows"]

_MIB = 2**20
# Logits are there twice, and once more while they are sampled from, sorted with their indices of 8 bytes.
_BYTES_PER_LOGIT = 4 + 4 + 12
# Workspace of cuBLAS, and kernels as they are loaded.
_LIBRARY_BYTES = 96 * _MIB
# Of a captured decode step beside its logits.
_GRAPH_BYTES = 4 * _MIB
# Interpreter, torch and all else: without and with CUDA and compiled Triton kernels.
CPU_PROCESS_BYTES = 352 * _MIB
_GPU_PROCESS_BYTES = 1280 * _MIB


def captured_graphs(config: EngineConfig) -> int:
    """Decode steps of up to so many sequences are captured."""
    return 0 if config.disable_cuda_graph else min(config.cuda_graph_max_bs, config.requests)


def gpu_rows(config: EngineConfig, model: ModelInfo, needed: GpuBytes) -> dict[str, int]:
    """Bytes of GPU memory by what takes them, in the order in which it is taken; `needed` without its weights."""
    graphs = captured_graphs(config)
    logits = 2 * 4 * model.vocab_size * graphs  # of the largest, and where all leave theirs
    sampling = config.requests * model.vocab_size * _BYTES_PER_LOGIT
    return {
        "workspace": needed.scratch,
        "CUDA graphs": graphs * _GRAPH_BYTES + logits,
        "running steps": needed.expanded + sampling + _LIBRARY_BYTES,
    }


def host_rows(config: EngineConfig, info: ExpertInfo, placed: ExpertPlan, max_tokens: int) -> dict[str, int]:
    """Bytes of RAM beside experts, with the trunk on a GPU. `max_tokens`: of a forward."""
    if not placed.uses_cpu:
        return {"process": _GPU_PROCESS_BYTES}
    # Hidden states to the CPU and results from it, as the strategies of `proa.moe` have them.
    rows = computed = max_tokens
    if placed.stream_from is not None:
        few, many = min(max(MAX_FEW_TOKENS, placed.stream_from - 1), max_tokens), min(PASS_ROWS, max_tokens)
        rows, computed = few + many, max(few, many)
    elif not placed.on_gpu.any():
        rows += min(MAX_FEW_TOKENS, max_tokens)
    exchange = rows * (2 * 4 * info.hidden + 2 * 4 * info.top_k)
    # Of the scratch of the CPU's experts only what they compute with becomes resident.
    scratch = expert_scratch_bytes(computed, info.hidden, ((info.intermediate, info.top_k),), config.num_threads)
    return {"pinned buffers": exchange, "workspace": scratch, "process": _GPU_PROCESS_BYTES}
