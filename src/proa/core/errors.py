"""The exception tree.

ProaError
├── UserError                 the request is wrong: 4xx with the OpenAI error body
│   ├── ContextLengthError    prompt + max_tokens exceed the context
│   └── QueueFullError        429, carries Retry-After
├── UnavailableError          503: the engine is loading, restarting or draining
├── CheckpointError           a model directory that cannot be loaded as it is
├── UnsupportedError          a model, format or flag proa does not have
├── KernelFaultError          a kernel that computes wrong results on this machine
├── StorageError              a disk that is full or fails while something is written
└── ConfigError               a flag or environment variable with a wrong value
    └── MemoryShortageError   what is to be served does not fit this machine

Messages read `[where] expected X, got Y. Fix: Z`.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "KernelFaultError",
    "MemoryShortageError",
    "ProaError",
    "QueueFullError",
    "StorageError",
    "UnavailableError",
    "UnsupportedError",
    "UserError",
]


class ProaError(Exception):
    """Base of every error proa raises on purpose."""

    def __init__(self, where: str, expected: str, got: object, fix: str = "") -> None:
        self.where = where
        text = f"[{where}] expected {expected}, got {got}."
        super().__init__(f"{text} Fix: {fix}" if fix else text)


class UserError(ProaError):
    """A request the client can mend. `param` names the field, `code` is OpenAI's machine-readable code."""

    http_status = 400

    def __init__(self, where: str, expected: str, got: object, fix: str = "", *, code: str = "invalid_value") -> None:
        super().__init__(where, expected, got, fix)
        self.param = where
        self.code = code


class ContextLengthError(UserError):
    """The prompt, or the prompt with max_tokens, does not fit the context."""

    def __init__(self, where: str, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        super().__init__(
            where,
            f"prompt + max_tokens <= {limit} tokens",
            f"{prompt_tokens} + {max_tokens} = {prompt_tokens + max_tokens}",
            "shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )


class QueueFullError(UserError):
    """Too many requests wait already."""

    http_status = 429

    def __init__(self, limit: int, retry_after_s: int = 1) -> None:
        super().__init__("queue", f"at most {limit} requests in flight", "one more", "retry later", code="queue_full")
        self.retry_after_s = retry_after_s


class UnavailableError(ProaError):
    """The engine cannot take requests now. `code` says why to machines, `retry_after_s` when to ask again."""

    http_status = 503
    code = "unavailable"
    retry_after_s = 5


class CheckpointError(ProaError):
    """A model directory that is missing, damaged or inconsistent."""


class UnsupportedError(ProaError):
    """Something proa does not have."""


class KernelFaultError(ProaError):
    """A kernel that fails its self-test: nothing it computes can be served."""


class ConfigError(ProaError):
    """A flag or environment variable with a wrong value."""


class MemoryShortageError(ConfigError):
    """What is to be served needs more RAM or GPU memory than there is."""


class StorageError(ProaError):
    """A disk that is full or fails while something is written."""
