from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test modules are imported by path (importmode=importlib); the helpers beside them need this.
sys.path.insert(0, str(Path(__file__).parent))
from engines import FakeModel
from gateway_process import GatewayProcess

from proa.gateway.config import GatewayConfig
from proa.gateway.supervisor import Supervisor


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


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., FakeModel]:
    """Makes models that the fake engine serves: `fake(name, *options, **fields)`."""

    def make(name: str = "m", *options: str, **fields: Any) -> FakeModel:
        return FakeModel(tmp_path, name, *options, **fields)

    return make


@pytest.fixture
async def supervise() -> AsyncIterator[Callable[..., Awaitable[Supervisor]]]:
    """Starts supervisors of fake models, which are closed at the end and leave no process behind."""
    running: list[Supervisor] = []

    async def start(*models: FakeModel, **fields: Any) -> Supervisor:
        supervisor = Supervisor(GatewayConfig(models={m.config.name: m.config for m in models}, **fields))
        running.append(supervisor)
        await supervisor.start()
        return supervisor

    yield start
    for supervisor in running:
        await supervisor.close()
        assert not supervisor._tasks and not supervisor._runs
