"""proa itself: `proa serve`, which reports the bytes it has loaded."""

from __future__ import annotations

import sys

import msgspec

from proa.gateway.backends.backend import Address, Backend, Invocation, bearer, option
from proa.gateway.config import ModelConfig

__all__ = ["ProaBackend"]


class _Load(msgspec.Struct):
    bytes_done: int
    bytes_total: int


class _Readiness(msgspec.Struct):
    load: _Load | None = None


class ProaBackend(Backend):
    """`proa serve PATH`."""

    name = "proa"
    ready_path = "/readyz"

    def invocation(self, model: ModelConfig, address: Address) -> Invocation:
        # -P: with -m alone Python would import from the working directory, which may be a model's.
        program = model.command or (sys.executable, "-P", "-m", "proa.cli.main", "serve")
        command = (
            *program,
            model.path,
            *("--host", address.host, "--port", str(address.port)),
            *("--served-model-name", model.served_name or model.name),
            *option("--kt-weight-path", model.kt_weight_path),
            *option("--context-length", model.context_length),
        )
        return Invocation(command, {"PROA_API_KEY": address.secret}, bearer(address.secret))

    def reported_bytes(self, ready_answer: bytes) -> tuple[int, int] | None:
        try:
            load = msgspec.json.decode(ready_answer, type=_Readiness).load
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None
        return None if load is None else (load.bytes_done, load.bytes_total)
