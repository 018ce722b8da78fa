"""vLLM: `vllm serve`."""

from __future__ import annotations

from pathlib import Path

from proa.gateway.backends.backend import Address, Backend, Invocation, bearer, option
from proa.gateway.config import ModelConfig

__all__ = ["VllmBackend"]


class VllmBackend(Backend):
    """`vllm serve PATH` of `venv`, or of the search path."""

    name = "vllm"

    def invocation(self, model: ModelConfig, address: Address) -> Invocation:
        program = str(Path(model.venv) / "bin" / "vllm") if model.venv else "vllm"
        command = (
            *(model.command or (program, "serve")),
            model.path,
            *("--host", address.host, "--port", str(address.port)),
            *("--served-model-name", model.served_name or model.name),
            *option("--max-model-len", model.context_length),
        )
        return Invocation(command, {"VLLM_API_KEY": address.secret}, bearer(address.secret))
