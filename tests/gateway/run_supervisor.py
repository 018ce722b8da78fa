"""A process that loads one model and then waits to be killed: `run_supervisor.py COMMAND...`."""

from __future__ import annotations

import asyncio
import sys

from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.supervisor import Supervisor


async def main() -> None:
    model = ModelConfig(name="m", backend="command", command=tuple(sys.argv[1:]), ready_path="/health")
    supervisor = Supervisor(GatewayConfig(models={"m": model}))
    await supervisor.load("m")
    print("loaded", flush=True)
    await asyncio.sleep(3600)


asyncio.run(main())
