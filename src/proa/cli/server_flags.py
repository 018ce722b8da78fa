"""Flags of `proa serve` for the endpoint: each sets a field of `ServerConfig`."""

from __future__ import annotations

from pathlib import Path

from proa.chat.answer_style import REASONING_PARSERS
from proa.chat.output.parser import FAMILIES
from proa.cli.flag import Flag

__all__ = ["SERVER_FLAGS"]

SERVER_FLAGS: tuple[Flag, ...] = (
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
)
