"""The terminal: results go to stdout, everything else to stderr, so that output can be piped."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

__all__ = ["err", "error", "out"]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def error(message: str) -> None:
    """Print one error line to stderr."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
