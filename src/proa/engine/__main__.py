"""`python -m proa.engine`: the engine process, with an EngineConfig as JSON on standard input."""

from __future__ import annotations

import logging
import sys

from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint
from proa.engine.loop import EXIT_USER, run_engine

logger = logging.getLogger("proa.engine")


def main() -> int:
    """Return the exit code."""
    try:
        config = EngineConfig.from_json(sys.stdin.buffer.read())
    except ConfigError as error:
        # Nobody to send it to: the addresses are in the config.
        logger.error("%s", error)
        return EXIT_USER
    return run_engine(config, load_checkpoint)


if __name__ == "__main__":
    sys.exit(main())
