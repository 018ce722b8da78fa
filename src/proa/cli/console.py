"""The terminal: results go to stdout, everything else to stderr, so that output can be piped."""

from __future__ import annotations

import inspect

from rich.console import Console
from rich.markup import escape

from proa.core.errors import CheckpointError, ConfigError, ProaError, UnsupportedError

__all__ = ["err", "error", "exit_status", "help_text", "out"]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def error(message: str) -> None:
    """Print one error line to stderr."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def help_text(text: str) -> str:
    """`text` with each paragraph on one line, for the terminal to wrap; indented paragraphs (examples) as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split()) for p in paragraphs)


def exit_status(failure: ProaError) -> int:
    """2: wrong flags or configuration; 3: a model that cannot be served; 1: anything else."""
    if isinstance(failure, ConfigError | UnsupportedError):
        return 2
    return 3 if isinstance(failure, CheckpointError) else 1
