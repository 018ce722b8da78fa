"""Any command that serves OpenAI's API on the port it is given."""

from __future__ import annotations

from proa.gateway.backends.backend import Address, Backend, Invocation, bearer
from proa.gateway.config import ModelConfig

__all__ = ["CommandBackend"]


class CommandBackend(Backend):
    """The command as it is configured. It gets the secret where `command`, `args` or `env` say `${API_KEY}`."""

    name = "command"
    needs = ("command",)
    ready_path = "/v1/models"
    # It may be a wrapper around a container, whose port a process of someone else holds.
    listens_itself = False

    def invocation(self, model: ModelConfig, address: Address) -> Invocation:
        asks = any("${API_KEY}" in text for text in (*model.command, *model.args, *model.env.values()))
        return Invocation(model.command, headers=bearer(address.secret) if asks else {})
