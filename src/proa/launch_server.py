"""`python -m proa.launch_server`: SGLang's command line in front of `proa serve`."""

from __future__ import annotations

import sys

from proa.cli import console
from proa.cli.serve import run
from proa.cli.sglang_flags import parse
from proa.core.errors import ConfigError, ProaError, UnsupportedError

__all__ = ["main"]


def main() -> int:
    """Exit status: 0 after SIGTERM, 1 when serving failed, 2 for a wrong command line."""
    try:
        launch = parse(sys.argv[1:])
        for note in launch.notes:
            console.err.print(f"note: {note}", markup=False, soft_wrap=True)
        run(launch.model, launch.values)
    except (ConfigError, UnsupportedError) as error:
        console.error(str(error))
        return 2
    except ProaError as error:
        console.error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
