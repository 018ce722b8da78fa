"""The gateway's configuration as typed objects, wherever it was read from.

`yaml_config` makes them from gateway.yaml, `kt_config` from an application's config.json and models.json. Times are
seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["GatewayConfig", "Group", "ModelConfig", "Params", "WhileStarting"]

# Fields of a request body that replace the client's.
Params = Mapping[str, Any]
WhileStarting = Literal["hold", "refuse"]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model and how its engine is run.

    Attributes:
        name: what clients ask for, and what the engine is told to call itself where it can be told.
        backend: name of an entry of `backends.BACKENDS`.
        path: model directory or file.
        kt_weight_path: quantized weights of the routed experts (backends proa and kt).
        command: program and arguments; empty means the backend's own. `${PORT}`, `${HOST}`, `${MODEL}` and `${NAME}`
            are filled in.
        args: further arguments, after the backend's.
        env: further environment variables.
        venv: virtual environment whose python runs the engine (backends sglang-kt and vllm).
        host, port: where the engine listens; port 0 takes a free one.
        context_length: tokens; None leaves it to the engine.
        served_name: what the engine calls the model; empty means `name`.
        ready_path: GET of it answers 200 once the engine takes requests; empty means the backend's own.
        stall_timeout: a start without any progress for so long has failed. Progress: bytes reported, bytes read, log
            lines.
        stop_timeout: from SIGTERM to SIGKILL.
        drain_timeout: how long an unload or a new configuration waits for running requests.
        ttl: unloaded after so long without a request; None never.
        pin: never unloaded for idleness or to make room.
        preload: loaded when the gateway starts.
        memory: resource -> bytes it needs, such as {"ram": 640 << 30, "gpu": 20 << 30}. None: all there is, so it
            never runs beside another model.
        max_running: requests handed to the engine at a time; the rest waits here.
        max_waiting: requests that may wait; one more is answered 429.
        while_starting: hold requests until the engine is ready, or refuse them with 503 and Retry-After.
        cancel_load_after: a load nobody waits for any more is given up after so long; None: never.
        auto_build: install the engine into a virtual environment of its own when it is missing.
        params: fields set in each request body, whatever the client sent.
        aliases: further names, each with fields of its own, which go before `params`.
    """

    name: str
    backend: str = "proa"
    path: str = ""
    kt_weight_path: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    venv: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    context_length: int | None = None
    served_name: str = ""
    ready_path: str = ""
    stall_timeout: float = 300.0
    stop_timeout: float = 10.0
    drain_timeout: float = 600.0
    ttl: float | None = None
    pin: bool = False
    preload: bool = False
    memory: Mapping[str, int] | None = None
    max_running: int = 64
    max_waiting: int = 256
    while_starting: WhileStarting = "hold"
    cancel_load_after: float | None = 30.0
    auto_build: bool = False
    params: Params = field(default_factory=lambda: _EMPTY)
    aliases: Mapping[str, Params] = field(default_factory=lambda: _EMPTY)

    def launches_like(self, other: ModelConfig) -> bool:
        """Whether a running engine of `other` can serve this configuration."""
        return all(getattr(self, name) == getattr(other, name) for name in _LAUNCH_FIELDS)


_LAUNCH_FIELDS = (
    "name", "backend", "path", "kt_weight_path", "command", "args", "env", "venv", "host", "port", "context_length",
    "served_name", "ready_path",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Models of which at most `max_loaded` are loaded at a time."""

    members: tuple[str, ...]
    max_loaded: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything the gateway is told.

    Attributes:
        host, port: where the gateway listens.
        memory_budget: resource -> bytes all loaded models may need together. A resource that is not named is unlimited.
        patience: while a model waits for the memory of another, the other takes requests that came at most so long
            after the waiting model's first.
        log_lines: lines kept of each engine's output.
        source: file it was read from, for messages; empty when there is none.
    """

    models: Mapping[str, ModelConfig] = field(default_factory=lambda: _EMPTY)
    groups: Mapping[str, Group] = field(default_factory=lambda: _EMPTY)
    host: str = "127.0.0.1"
    port: int = 8080
    memory_budget: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
    patience: float = 10.0
    log_lines: int = 1000
    source: str = ""
