"""The flags of `proa serve`: one table, from which its options, `proa.launch_server` and docs/flags.md are made.

A flag sets one field of one package's configuration; its default is that field's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from proa.chat.answer_style import REASONING_PARSERS, check_parsers
from proa.chat.output.parser import FAMILIES
from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.server.config import ServerConfig

__all__ = ["DEMO", "FLAGS", "Flag", "Owner", "by_owner", "check_values", "default_of", "default_text"]

DEMO = "demo"  # the MODEL that is built when it is not there
Owner = Literal["server", "engine"]
CONFIGS: dict[Owner, type] = {"server": ServerConfig, "engine": EngineConfig}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option.

    unset: what happens when the default is None.
    between: smallest and largest number, where the config itself does not check.
    sglang: SGLang's spellings of the same thing.
    """

    name: str
    owner: Owner
    field: str
    kind: type[int] | type[float] | type[str] | type[bool] | type[Path]
    doc: str
    choices: tuple[str, ...] = ()
    unset: str = ""
    between: tuple[float, float] | None = None
    sglang: tuple[str, ...] = ()


FLAGS: tuple[Flag, ...] = (
    Flag("--host", "server", "host", str, "Address to listen on; 0.0.0.0 opens it to the network.", sglang=("--host",)),
    Flag("--port", "server", "port", int, "Port to listen on.", between=(1, 65535), sglang=("--port",)),
    Flag(
        "--served-model-name",
        "server",
        "served_model_name",
        str,
        "Name of the model in the API; more names after commas, * for any.",
        unset="the directory's name",
        sglang=("--served-model-name",),
    ),
    Flag(
        "--api-key",
        "server",
        "api_key",
        str,
        "Key every request has to carry; better in PROA_API_KEY.",
        unset="PROA_API_KEY, else no key",
        sglang=("--api-key",),
    ),
    Flag(
        "--chat-template",
        "server",
        "chat_template",
        Path,
        "File with a Jinja chat template.",
        unset="the checkpoint's own",
        sglang=("--chat-template",),
    ),
    Flag(
        "--tool-call-parser",
        "server",
        "tool_call_parser",
        str,
        f"How the model writes tool calls: {', '.join(sorted(set(FAMILIES) - {'none'}))}, SGLang's name for one of "
        "them, or none.",
        unset="what the chat template writes",
        sglang=("--tool-call-parser",),
    ),
    Flag(
        "--reasoning-parser",
        "server",
        "reasoning_parser",
        str,
        f"How the model reasons: {', '.join(sorted(REASONING_PARSERS))}, or none (it comes as content).",
        unset="what the chat template writes",
        sglang=("--reasoning-parser",),
    ),
    Flag(
        "--max-queued-requests",
        "server",
        "max_queued_requests",
        int,
        "Sequences that may wait beside those that run; the next gets 429.",
        between=(0, 100_000),
        sglang=("--max-queued-requests",),
    ),
    Flag(
        "--drain-timeout",
        "server",
        "drain_timeout",
        float,
        "Seconds that running requests may go on after SIGTERM.",
        between=(0, 86_400),
    ),
    Flag(
        "--watchdog-timeout",
        "server",
        "watchdog_timeout",
        float,
        "Seconds in which no layer is finished after which the engine is killed and started again.",
        between=(1, 86_400),
        sglang=("--watchdog-timeout",),
    ),
    Flag(
        "--sampling-defaults",
        "server",
        "sampling_defaults",
        str,
        "Where unset sampling fields come from: the model's generation_config.json, or OpenAI's defaults.",
        choices=("model", "openai"),
        sglang=("--sampling-defaults",),
    ),
    Flag(
        "--kt-weight-path",
        "engine",
        "expert_path",
        str,
        "GGUF file, directory of one GGUF model, or output of `proa convert`, to read the routed experts from.",
        unset="MODEL",
        sglang=("--kt-weight-path",),
    ),
    Flag(
        "--kt-method",
        "engine",
        "expert_method",
        str,
        "Format the routed experts must have: RAWINT4, GPTQ_INT4, FP8, FP8_PERCHANNEL, BF16, MXFP4, MXFP8, NVFP4, "
        "AMXINT4, AMXINT8, LLAMAFILE (GGUF files) or auto (any; it is detected either way).",
        sglang=("--kt-method",),
    ),
    Flag(
        "--expert-activations",
        "engine",
        "expert_activations",
        str,
        "What the inputs of routed and shared experts and dense MLPs may be rounded to: int8 is faster with weights of "
        "few bits, bf16 keeps at least that precision.",
        choices=("int8", "bf16"),
    ),
    Flag(
        "--device",
        "engine",
        "device",
        str,
        "Where all but the routed experts is computed: cuda, cpu, or auto (a GPU where there is a usable one).",
        choices=("auto", "cpu", "cuda"),
        sglang=("--device",),
    ),
    Flag(
        "--attention-backend",
        "engine",
        "attention_backend",
        str,
        "Attention on a GPU: triton, torch (plain operations, slow), flashinfer (taken for triton) or auto.",
        sglang=("--attention-backend",),
    ),
    Flag(
        "--mem-fraction-static",
        "engine",
        "mem_fraction_static",
        float,
        "Share of the GPU's memory that weights and KV cache may take together.",
        unset="what is free",
        sglang=("--mem-fraction-static",),
    ),
    Flag(
        "--disable-cuda-graph",
        "engine",
        "disable_cuda_graph",
        bool,
        "Launch every kernel of a decode step on a GPU by itself.",
        sglang=("--disable-cuda-graph",),
    ),
    Flag(
        "--cuda-graph-max-bs",
        "engine",
        "cuda_graph_max_bs",
        int,
        "Decode steps of at most so many sequences are captured as CUDA graphs at start.",
        sglang=("--cuda-graph-max-bs",),
    ),
    Flag(
        "--gpu-experts",
        "engine",
        "gpu_experts",
        int,
        "Routed experts of each layer, on average, in GPU memory instead of RAM, as far as they fit.",
        unset="what fits",
        sglang=("--kt-num-gpu-experts",),
    ),
    Flag(
        "--gpu-experts-ratio",
        "engine",
        "gpu_experts_ratio",
        float,
        "The same as a part of all experts, 0 to 1; goes before --gpu-experts.",
        unset="--gpu-experts",
        sglang=("--kt-gpu-experts-ratio",),
    ),
    Flag(
        "--expert-placement",
        "engine",
        "expert_placement",
        str,
        "Which experts those are; auto: frequency with --expert-location, else uniform.",
        choices=("auto", "uniform", "frequency", "front-loading", "random"),
        sglang=("--kt-expert-placement-strategy",),
    ),
    Flag(
        "--expert-location",
        "engine",
        "expert_location",
        str,
        "Routing counts for the placement: a .pt file with logical_count, or JSON.",
        unset="none",
        sglang=("--init-expert-location",),
    ),
    Flag(
        "--expert-updates",
        "engine",
        "expert_updates",
        bool,
        "Experts that are used most move to the GPU while the model answers; pins the RAM of experts.",
        sglang=("--kt-enable-dynamic-expert-update",),
    ),
    Flag(
        "--max-deferred-experts",
        "engine",
        "max_deferred_experts",
        int,
        "CPU experts of a token that may come a layer late in a decode step; changes what is computed.",
        sglang=("--kt-max-deferred-experts-per-token",),
    ),
    Flag(
        "--gpu-prefill-threshold",
        "engine",
        "gpu_prefill_threshold",
        int,
        "Passes of so many tokens stream all experts through the GPU, shorter ones none; 0: none do.",
        unset="what is fastest",
        sglang=("--kt-gpu-prefill-token-threshold",),
    ),
    Flag(
        "--max-running-requests",
        "engine",
        "max_running_requests",
        int,
        "Sequences in one forward pass.",
        sglang=("--max-running-requests",),
    ),
    Flag(
        "--context-length",
        "engine",
        "context_length",
        int,
        "Longest prompt + answer in tokens.",
        unset="the model's limit, or what the KV cache holds",
        sglang=("--context-length",),
    ),
    Flag(
        "--max-total-tokens",
        "engine",
        "max_total_tokens",
        int,
        "Size of the KV cache in tokens.",
        unset="from --memory-fraction",
        sglang=("--max-total-tokens",),
    ),
    Flag(
        "--memory-fraction",
        "engine",
        "memory_fraction",
        float,
        "Share of the RAM left after the weights that the KV cache may take on the CPU.",
    ),
    Flag(
        "--kv-cache-dtype",
        "engine",
        "kv_cache_dtype",
        str,
        "Number format of the KV cache; auto: float32 on the CPU, bfloat16 on a GPU unless the weights are float32.",
        choices=("auto", "float32", "bfloat16"),
        sglang=("--kv-cache-dtype",),
    ),
    Flag(
        "--block-size",
        "engine",
        "block_size",
        int,
        "Tokens per KV block; prefixes are shared in whole blocks.",
        unset="16, on a GPU 64 or 128",
        sglang=("--page-size",),
    ),
    Flag(
        "--chunked-prefill-size",
        "engine",
        "chunked_prefill_size",
        int,
        "Most prompt tokens in one pass through the layers.",
        unset="512, on a GPU what fits",
        sglang=("--chunked-prefill-size",),
    ),
    Flag(
        "--prefill-max-requests",
        "engine",
        "prefill_max_requests",
        int,
        "Most prompts in one pass: the oldest gets half of it, the shortest what they lack.",
        unset="no limit",
        sglang=("--prefill-max-requests",),
    ),
    Flag(
        "--max-decode-gap-ms",
        "engine",
        "max_decode_gap_ms",
        float,
        "Most milliseconds between tokens of answers beside a prompt, and a layer more.",
        unset="200 to 500",
    ),
    Flag(
        "--disable-radix-cache",
        "engine",
        "disable_radix_cache",
        bool,
        "Do not reuse the KV cache of earlier prompts.",
        sglang=("--disable-radix-cache",),
    ),
    Flag(
        "--threads",
        "engine",
        "num_threads",
        int,
        "Threads that compute.",
        unset="one per physical core",
        sglang=("--kt-cpuinfer",),
    ),
    Flag(
        "--random-seed",
        "engine",
        "random_seed",
        int,
        "Seed for requests that bring none.",
        unset="from the system",
        sglang=("--random-seed",),
    ),
    Flag(
        "--log-level",
        "engine",
        "log_level",
        str,
        "How much the processes log.",
        choices=("debug", "info", "warning", "error"),
        unset="PROA_LOG_LEVEL, else info",
        sglang=("--log-level",),
    ),
)


def by_owner(values: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
    """Config fields of one package from flag values by flag name; flags that were not given (None) are left out."""
    given = {flag.name: flag for flag in FLAGS if flag.owner == owner}
    return {given[name].field: value for name, value in values.items() if name in given and value is not None}


def check_values(values: Mapping[str, Any]) -> None:
    """Check what the configs themselves do not, before a model is looked at.

    Raises:
        ConfigError: a number outside its flag's `between`.
        UnsupportedError: a parser there is not.
    """
    for flag in FLAGS:
        value = values.get(flag.name)
        if flag.between and value is not None and not flag.between[0] <= value <= flag.between[1]:
            raise ConfigError(flag.name, f"a number from {flag.between[0]:g} to {flag.between[1]:g}", value)
    check_parsers(values.get("--tool-call-parser"), values.get("--reasoning-parser"))


def default_of(flag: Flag) -> Any:
    """The default in the owner's config; None when the owner decides."""
    config = CONFIGS[flag.owner]
    if is_dataclass(config):
        for field in fields(config):
            if field.name == flag.field:
                return None if field.default is MISSING else field.default
    else:
        for entry in msgspec.structs.fields(config):
            if entry.name == flag.field:
                return None if entry.default is msgspec.NODEFAULT else entry.default
    raise AssertionError(f"{config.__name__} has no field {flag.field}")


def default_text(flag: Flag) -> str:
    """The default as a person reads it."""
    default = default_of(flag)
    if flag.unset and default in {None, ""}:
        return flag.unset
    if flag.kind is bool:
        return "on" if default else "off"
    return str(default)
