from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test modules are imported by path (importmode=importlib); the helpers beside them need this.
sys.path.insert(0, str(Path(__file__).parent))
from gateway_process import GatewayProcess


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways with settings of the test's own."""
    started: list[GatewayProcess] = []

    def start(models: dict[str, list[str]], **settings: Any) -> GatewayProcess:
        started.append(GatewayProcess(tmp_path, models, **settings))
        return started[-1].wait_ready()

    yield start
    for gateway in started:
        gateway.stop()
