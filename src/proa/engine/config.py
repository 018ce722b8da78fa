"""What the engine process is told at start, as JSON on its standard input. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from proa.core.errors import ConfigError

__all__ = ["CPU_PASS_TOKENS", "EngineConfig", "ExpertMethod"]

# Prompt tokens of a pass on the CPU: with more no expert's weights are read less often per token that it has.
CPU_PASS_TOKENS = 512
_REQUESTS = 16

_Positive = Annotated[int, Meta(ge=1)]

# KTransformers' names. What they mean stands in `proa.models.expert_method`, which the API process does not import.
# fmt: off
ExpertMethod = Literal[
    "auto", "LLAMAFILE", "RAWINT4", "GPTQ_INT4", "FP8", "FP8_PERCHANNEL",
    "BF16", "MXFP4", "MXFP8", "NVFP4", "AMXINT4", "AMXINT8",
]
# fmt: on


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`None` means: chosen by the engine from the model and the machine, and reported in `Ready.info`.

    to_engine, from_engine: ZMQ addresses (`ipc://...`) bound by the API process.
    parent_pid: the API process; the engine exits when it is gone (0: whoever started the engine).
    max_running_requests: sequences in one forward pass (None: cuda_graph_max_bs, fewer where memory is short).
    max_total_tokens: KV cache size in tokens.
    context_length: longest prompt + answer in tokens; refused when the KV cache cannot hold it.
    block_size: tokens of a block of the KV cache (None: 16 on the CPU, on a GPU what its attention reads fastest).
    chunked_prefill_size: most prompt tokens of a pass (None: 512 on the CPU, on a GPU what memory allows),
    prefill_max_requests: most prompts in one (None: all that run).
    max_decode_gap_ms: between the tokens of running answers while prompts are computed, a layer more at most.
    memory_fraction: share of the available memory, after weights and a reserve, the KV cache may take when auto.
    expert_path: GGUF, or a converted directory, that the routed experts are read from; None: `model_path`.
    expert_method: what format the experts are in, an error when they are not; auto: any. LLAMAFILE: in GGUF files.
    expert_activations: what gated MLPs (routed and shared experts, dense layers) may round their inputs to.
    device: of the trunk; auto: a GPU where there is a usable one. Routed experts are in RAM either way.
    attention_backend: on a GPU; for flashinfer triton is taken.
    mem_fraction_static: share of the GPU's memory that weights and KV cache may take together.
    disable_cuda_graph, cuda_graph_max_bs: decode steps of up to so many sequences are captured as CUDA graphs at start.
    gpu_experts, gpu_experts_ratio: routed experts on the GPU at most, per layer or of all; the ratio goes first. None:
    as many as fit.
    expert_placement: which ones they are; a file of routing counts, expert_location, goes with frequency and auto.
    expert_updates: experts change places while the model answers, after what it uses.
    max_deferred_experts: of a token in a decode step, experts on the CPU that may come one layer late.
    gpu_prefill_threshold: passes of so many tokens and more stream all experts through the GPU, shorter ones none; 0:
        none do, None: each expert of a pass is where that is fastest.
    random_seed: makes requests without a seed reproducible from run to run; None draws from the OS.
    """

    model_path: str
    to_engine: str
    from_engine: str
    expert_path: str | None = None
    expert_method: ExpertMethod = "auto"
    expert_activations: Literal["int8", "bf16"] = "int8"
    parent_pid: Annotated[int, Meta(ge=0)] = 0
    max_running_requests: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_total_tokens: _Positive | None = None
    context_length: _Positive | None = None
    chunked_prefill_size: Annotated[int, Meta(ge=1, le=65536)] | None = None
    prefill_max_requests: _Positive | None = None
    max_decode_gap_ms: Annotated[float, Meta(gt=0.0)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    disable_radix_cache: bool = False
    num_threads: _Positive | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "triton", "torch", "flashinfer"] = "auto"
    mem_fraction_static: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: Annotated[int, Meta(ge=1, le=256)] = 16
    gpu_experts: Annotated[int, Meta(ge=0)] | None = None
    gpu_experts_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    expert_placement: Literal["auto", "uniform", "frequency", "front-loading", "random"] = "auto"
    expert_location: str | None = None
    expert_updates: bool = False
    max_deferred_experts: Annotated[int, Meta(ge=0, le=64)] = 0
    gpu_prefill_threshold: Annotated[int, Meta(ge=0)] | None = None
    random_seed: int | None = None
    memory_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.8
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @staticmethod
    def from_json(data: bytes) -> EngineConfig:
        """Decode and check; ConfigError names the field."""
        try:
            config = msgspec.json.decode(data, type=EngineConfig)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("engine config", "an EngineConfig as JSON", str(error)) from error
        if config.expert_method == "LLAMAFILE" and config.expert_path is None:
            fix = "name the GGUF file, the first of a split model, or their directory"
            raise ConfigError("expert_method", "--kt-weight-path with LLAMAFILE", "none", fix)
        return config

    @property
    def requests(self) -> int:
        """Sequences in one forward pass, where `proa.engine.solve` had no say."""
        return self.max_running_requests or _REQUESTS

    @property
    def pass_tokens(self) -> int:
        """Most prompt tokens of a pass, likewise."""
        return self.chunked_prefill_size or CPU_PASS_TOKENS

    def to_json(self) -> bytes:
        """The bytes the engine process reads."""
        return msgspec.json.encode(self)
