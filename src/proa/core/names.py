"""Names that files bring along."""

from __future__ import annotations

from typing import Any

from proa.core.errors import CheckpointError

__all__ = ["check_tensor_name", "shortened"]

MAX_NAME_LENGTH = 512
_MAX_SHOWN = 200


def check_tensor_name(name: str, where: str) -> None:
    """CheckpointError unless `name` can be printed: names end up in messages, logs and terminals."""
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(where, f"printable tensor names of at most {MAX_NAME_LENGTH} characters", shortened(name))


def shortened(value: Any) -> str:
    """The repr of a value from a file, at a length fit for a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
