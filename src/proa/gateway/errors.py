"""What the gateway answers when there is no engine for a request.

ProaError
├── UserError
│   ├── UnknownModelError   404: a name that no model and no alias has; lists those there are
│   └── QueueFullError      429 + Retry-After: as many requests wait for this model as may (core.errors)
└── EngineUnavailableError  503 + Retry-After, `code` tells which
    ├── EngineStartingError      engine_starting: the model refuses instead of holding requests while it loads
    ├── EngineCoolingDownError   engine_cooling_down: it failed, and is not tried again before retry_after_s
    ├── EngineFailedError        engine_failed: the start this request waited for failed, or its engine ended
    ├── NoRoomError              no_room: what is pinned leaves too little memory for it
    └── GatewayStoppingError     gateway_stopping
"""

from __future__ import annotations

from collections.abc import Sequence

from proa.core.errors import UnavailableError, UserError

__all__ = [
    "EngineCoolingDownError",
    "EngineFailedError",
    "EngineStartingError",
    "EngineUnavailableError",
    "GatewayStoppingError",
    "NoRoomError",
    "UnknownModelError",
]

_MANY_NAMES = 40


class UnknownModelError(UserError):
    """A model this gateway does not have."""

    http_status = 404

    def __init__(self, name: str, known: Sequence[str]) -> None:
        listed = " | ".join(known[:_MANY_NAMES]) or "a model (none is configured)"
        more = f" and {len(known) - _MANY_NAMES} more" if len(known) > _MANY_NAMES else ""
        super().__init__("model", listed + more, repr(name[:200]), "name one of these", code="model_not_found")


class EngineUnavailableError(UnavailableError):
    """No engine for this model now. `retry_after_s`: whole seconds after which it makes sense to ask again."""

    code = "unavailable"

    def __init__(self, model: str, got: str, retry_after_s: float, fix: str = "retry later") -> None:
        super().__init__(f"model {model}" if model else "gateway", "a running engine", got, fix)
        self.model = model
        self.got = got
        self.retry_after_s = max(1, int(retry_after_s + 0.999))


class EngineStartingError(EngineUnavailableError):
    """The engine loads; requests are not held."""

    code = "engine_starting"


class EngineCoolingDownError(EngineUnavailableError):
    """The engine failed a moment ago."""

    code = "engine_cooling_down"


class EngineFailedError(EngineUnavailableError):
    """The engine this request waited for failed to start or ended."""

    code = "engine_failed"


class NoRoomError(EngineUnavailableError):
    """The model can never be loaded beside what is pinned, or within the budget."""

    code = "no_room"


class GatewayStoppingError(EngineUnavailableError):
    """The gateway takes no more requests."""

    code = "gateway_stopping"
