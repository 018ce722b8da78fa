"""The kinds of engines the gateway can run. A new one is a file, an entry of BACKENDS and a test."""

from __future__ import annotations

from proa.gateway.backends.backend import Address, Backend, Installation, Invocation
from proa.gateway.backends.command import CommandBackend
from proa.gateway.backends.kt import KtBackend
from proa.gateway.backends.llama_server import LlamaServerBackend
from proa.gateway.backends.proa import ProaBackend
from proa.gateway.backends.vllm import VllmBackend

__all__ = ["BACKENDS", "Address", "Backend", "Installation", "Invocation"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (ProaBackend(), KtBackend(), LlamaServerBackend(), VllmBackend(), CommandBackend())
}
# The name of the package is as good as that of the backend.
BACKENDS["sglang-kt"] = BACKENDS["kt"]
