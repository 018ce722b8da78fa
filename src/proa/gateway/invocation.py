"""From a model's configuration to the command, environment and address of one run."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from proa.core import env
from proa.gateway.backends import Address, Backend, Invocation
from proa.gateway.config import ModelConfig

__all__ = ["PLACEHOLDERS", "invoke", "placeholders", "used_flags", "weight_bytes"]

# What `command`, `args` and `env` may contain.
PLACEHOLDERS = ("HOST", "PORT", "MODEL", "NAME", "API_KEY")
# The gateway's own: an engine that read them would ask for the wrong key, or speak to systemd in our name.
_WITHHELD = ("PROA_API_KEY", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt"}


def invoke(backend: Backend, model: ModelConfig, port: int) -> Invocation:
    """The whole command and environment of a run on `port`, with a new secret."""
    address = Address(model.host, port, secrets.token_urlsafe(32))
    made = backend.invocation(model, address)
    values = {
        "HOST": address.host,
        "PORT": str(port),
        "MODEL": model.path,
        "NAME": model.served_name or model.name,
        "API_KEY": address.secret,
    }
    environment = env.child_environment()
    for name in _WITHHELD:
        environment.pop(name, None)
    own = {name: _fill(value, values) for name, value in model.env.items()}
    command = tuple(_fill(word, values) for word in (*made.command, *model.args))
    return Invocation(command, {**environment, **made.env, **own}, made.headers)


def placeholders(text: str) -> list[str]:
    """Names of the placeholders in a text."""
    return _PLACEHOLDER.findall(text)


def used_flags(command: tuple[str, ...]) -> list[str]:
    """The flags (`--name`) of a command, without their values."""
    return [word.split("=", 1)[0] for word in command if word.startswith("--") and len(word) > 2]


def weight_bytes(model: ModelConfig) -> int | None:
    """Size of a model's weight files, None when there are none to be seen."""
    files = {file for path in (model.path, model.kt_weight_path) if path for file in _weight_files(Path(path))}
    return sum(file.stat().st_size for file in files) or None


def _weight_files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return [file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file()]
        if _SHARD.search(path.name):
            return list(path.parent.glob(_SHARD.sub(r"-?????-of-\1", path.name)))
        return [path] if path.is_file() else []
    except OSError:
        return []


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)
