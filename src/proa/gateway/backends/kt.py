"""KTransformers: SGLang's fork `sglang-kt` with `kt-kernel`."""

from __future__ import annotations

import sys
from pathlib import Path

from proa.core import env
from proa.gateway.backends.backend import Address, Backend, Installation, Invocation, bearer, option
from proa.gateway.config import ModelConfig

__all__ = ["KtBackend"]

# The wheels carry parts of one another, so their versions must be the same.
_VERSION = "0.7.2"
_PACKAGES = tuple(f"{name}=={_VERSION}" for name in ("ktransformers", "kt-kernel", "sglang-kt"))


class KtBackend(Backend):
    """`python -m sglang.launch_server` of a Python that has sglang-kt: `venv`, `auto_build`'s own, or this one."""

    name = "kt"
    # Generates a token: what answers it has its weights, and kernels that run.
    ready_path = "/health_generate"

    def invocation(self, model: ModelConfig, address: Address) -> Invocation:
        command = (
            *self._program(model),
            *("--host", address.host, "--port", str(address.port)),
            *("--model", model.path),
            *option("--kt-weight-path", model.kt_weight_path),
            *("--served-model-name", model.served_name or model.name),
            *option("--context-length", model.context_length),
            # It reads a key from no variable and no file.
            *("--api-key", address.secret),
        )
        # As -P, which its Python may be too old for: nothing is imported from the working directory.
        return Invocation(command, {"PYTHONSAFEPATH": "1"}, bearer(address.secret))

    def help_command(self, model: ModelConfig) -> tuple[str, ...]:
        return (*self._program(model), "--help")

    def installation(self, model: ModelConfig) -> Installation:
        return Installation(Path(model.venv or _own_venv()), _PACKAGES)

    def _program(self, model: ModelConfig) -> tuple[str, ...]:
        if model.command:
            return model.command
        python = sys.executable
        if model.venv or model.auto_build:
            python = self.installation(model).python
        return (python, "-m", "sglang.launch_server")


def _own_venv() -> Path:
    return env.cache_dir() / "gateway" / f"sglang-kt-{_VERSION}"
