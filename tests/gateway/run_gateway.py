"""Runs a gateway, as a process of its own. Argument: a JSON object {"gateway": ..., "models": [...], "http": ...}."""

from __future__ import annotations

import json
import sys

from proa.core.logging import configure
from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.http_settings import HttpSettings
from proa.gateway.launch import run


def main() -> None:
    settings = json.loads(sys.argv[1])
    configure("debug", process="gateway")
    models = [ModelConfig(**{**model, "command": tuple(model["command"])}) for model in settings["models"]]
    config = GatewayConfig(models={model.name: model for model in models}, **settings["gateway"])
    run(config, HttpSettings(**settings["http"]))


if __name__ == "__main__":
    main()
