"""The supervisor with the fake engine: what a proxy relies on."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.errors import UnknownModelError
from proa.gateway.supervisor import Supervisor

FAKE = Path(__file__).with_name("fake_engine.py")


def model(name, journal, *options, **fields):
    command = (sys.executable, "-S", "-E", str(FAKE), "--port", "${PORT}", "--journal", str(journal), *options)
    return ModelConfig(name=name, backend="command", command=command, ready_path="/health", **fields)


def journal(path, event):
    return [entry for line in path.read_text().splitlines() if (entry := json.loads(line))["event"] == event]


@pytest.fixture
async def start():
    running = []

    async def start(*models, **fields):
        supervisor = Supervisor(GatewayConfig(models={m.name: m for m in models}, **fields))
        running.append(supervisor)
        await supervisor.start()
        return supervisor

    yield start
    for supervisor in running:
        await supervisor.close()


async def test_fifty_first_requests_start_one_engine(start, tmp_path):
    supervisor = await start(model("m", tmp_path / "j", "--start-delay", "0.1"))
    leases = await asyncio.gather(*(supervisor.acquire("m") for _ in range(50)))
    assert len({lease.engine.base_url for lease in leases}) == 1
    assert len(journal(tmp_path / "j", "started")) == 1
    async with httpx.AsyncClient(base_url=leases[0].engine.base_url) as client:
        assert (await client.post("/v1/chat/completions", json={"messages": []})).status_code == 200


async def test_an_unknown_model_is_answered_with_those_there_are(start, tmp_path):
    supervisor = await start(model("m", tmp_path / "j", aliases={"fast": {}}))
    with pytest.raises(UnknownModelError, match=r"m \| fast"):
        supervisor.ticket("other")
