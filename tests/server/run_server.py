"""Runs `serve` with the fake engine, as a process of its own. Argument: a JSON object of settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from proa.core.logging import configure
from proa.server.config import ServerConfig
from proa.server.launch import serve


def _say(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


def main() -> int:
    settings = json.loads(sys.argv[1])
    configure(settings.get("log_level", "debug"), process="api")
    server = {
        key: Path(value) if key in ("model_path", "chat_template") else value
        for key, value in settings["server"].items()
    }
    command = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
    result = serve(
        ServerConfig(**server),
        settings.get("engine_command", command),
        json.dumps(settings.get("engine", {})).encode(),
        on_listening=_say,
    )
    if result.message:
        sys.stderr.write(result.message + "\n")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
