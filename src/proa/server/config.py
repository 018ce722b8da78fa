"""What the API process is told at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ANY_MODEL", "ServerConfig"]

ANY_MODEL = "*"

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the API process. Times in seconds.

    model_path: directory with generation_config.json, tokenizer.json and the chat template (or Kimi's tiktoken.model).
    expert_path: where routed experts are read from; a GGUF file there may have the tokenizer that model_path lacks.
    api_key: every route but /livez asks for it when set.
    served_model_name, aliases: names a request may give as `model`, the former separated by commas; the first one is
        reported. ANY_MODEL among them takes whatever a request says.
    tool_call_parser, reasoning_parser: names as in `proa.chat.answer_style`; None: what the chat template writes.
    sampling_defaults: "model" takes what generation_config.json says, "openai" OpenAI's defaults (all 1.0).
    max_queued_requests: sequences that may wait beyond those the engine runs; the next one gets 429.
    max_total_body_bytes: request bodies held in memory at one time, over all connections.
    header_timeout, body_idle_timeout, body_timeout, write_timeout: a slower client is cut off; write_timeout is how
        long it may leave a full send buffer untouched.
    keepalive_interval: silence on a stream after which a comment line is sent.
    drain_timeout: how long running requests may go on after SIGTERM.
    watchdog_timeout: silence of a ready engine after which it is killed and started again; longer than its longest
        layer, or step of few tokens.
    restart_backoff, max_restart_backoff: first and longest wait before the engine is started again; doubled each time.
    max_start_attempts: starts in a row that may fail before the server gives up on an engine that never was ready.
    """

    model_path: Path
    expert_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    aliases: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    sampling_defaults: Literal["model", "openai"] = "model"
    max_queued_requests: int = 256
    max_body_bytes: int = 16 * _MIB
    max_total_body_bytes: int = 64 * _MIB
    max_header_bytes: int = 64 * 1024
    max_header_fields: int = 128
    max_connections: int = 4096
    header_timeout: float = 10.0
    body_idle_timeout: float = 10.0
    body_timeout: float = 120.0
    write_timeout: float = 60.0
    keep_alive_timeout: float = 30.0
    keepalive_interval: float = 10.0
    drain_timeout: float = 60.0
    watchdog_timeout: float = 300.0
    restart_backoff: float = 1.0
    max_restart_backoff: float = 60.0
    max_start_attempts: int = 3

    @property
    def model_name(self) -> str:
        """The name reported in responses."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name a request may use."""
        names = [name for name in self._given_names if name not in ("", ANY_MODEL)]
        return (*(names or [self.model_path.resolve().name]), *self.aliases)

    @property
    def _given_names(self) -> list[str]:
        return [name.strip() for name in (self.served_model_name or "").split(",")]

    def serves(self, name: str) -> bool:
        """Whether a request may say `name`."""
        return name in self.model_names or ANY_MODEL in self._given_names
