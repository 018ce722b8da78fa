"""llama.cpp's `llama-server`."""

from __future__ import annotations

from proa.gateway.backends.backend import Address, Backend, Invocation, bearer, option
from proa.gateway.config import ModelConfig

__all__ = ["LlamaServerBackend"]


class LlamaServerBackend(Backend):
    """`llama-server -m FILE`, or another program by `command`."""

    name = "llama-server"

    def invocation(self, model: ModelConfig, address: Address) -> Invocation:
        command = (
            *(model.command or ("llama-server",)),
            *("--host", address.host, "--port", str(address.port)),
            *("-m", model.path),
            *("--alias", model.served_name or model.name),
            *option("-c", model.context_length),
        )
        return Invocation(command, {"LLAMA_API_KEY": address.secret}, bearer(address.secret))
