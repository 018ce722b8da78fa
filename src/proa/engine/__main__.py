"""`python -m proa.engine`: the engine process, with an EngineConfig as JSON on standard input."""

from __future__ import annotations

import logging
import sys

from proa.core.errors import ConfigError
from proa.engine.build import LoadedModel, Report
from proa.engine.config import EngineConfig
from proa.engine.loop import EXIT_USER, run_engine

logger = logging.getLogger("proa.engine")


def _load(config: EngineConfig, report: Report) -> LoadedModel:
    # Imported once faults can be reported: the extension refuses a wrong PROA_FORCE_ISA or a stale build.
    from proa.engine.load import load_checkpoint

    return load_checkpoint(config, report)


def main() -> int:
    """Return the exit code."""
    try:
        config = EngineConfig.from_json(sys.stdin.buffer.read())
    except ConfigError as error:
        # Nobody to send it to: the addresses are in the config.
        logger.error("%s", error)
        return EXIT_USER
    return run_engine(config, _load)


if __name__ == "__main__":
    sys.exit(main())
