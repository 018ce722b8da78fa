"""`python -m proa.launch_server`: SGLang's command line in front of `proa serve`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` imports from the working directory first, which may be a model's.
    del sys.path[0]

from proa.cli import console
from proa.cli.serve import run
from proa.cli.sglang_flags import parse
from proa.core.errors import ProaError

__all__ = ["main"]


def main() -> int:
    """Exit status: 0 after SIGTERM, else that of `console.exit_status`."""
    try:
        launch = parse(sys.argv[1:])
        run(launch.model, launch.values, launch.notes)
    except ProaError as failure:
        console.error(str(failure))
        return console.exit_status(failure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
