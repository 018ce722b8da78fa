"""Log set-up of a process. Libraries only ever call `logging.getLogger("proa....")`."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from proa.core.errors import ConfigError

__all__ = ["configure"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_HANDLER_NAME = "proa"


def configure(level: str, *, process: str = "proa", stream: TextIO | None = None) -> None:
    """Send the log of every `proa.*` logger to `stream` (default stderr), one line per record.

    `process` stands in each line, so that the lines of the API and the engine process can be told apart.
    Calling it again replaces the former set-up.

    Raises:
        ConfigError: unknown level.
    """
    if level not in _LEVELS:
        raise ConfigError("log_level", " | ".join(_LEVELS), repr(level))
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d {process} %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    logger = logging.getLogger("proa")
    logger.handlers = [h for h in logger.handlers if h.get_name() != _HANDLER_NAME]
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level])
    logger.propagate = False
