"""The parts of one gateway process, as its routes use them."""

from __future__ import annotations

import asyncio
import time

from proa.gateway.config import GatewayConfig
from proa.gateway.errors import GatewayStoppingError
from proa.gateway.http_settings import HttpSettings
from proa.gateway.leases import Ticket
from proa.gateway.metrics import Metrics
from proa.gateway.supervisor import Supervisor
from proa.server.body_budget import BodyBudget

__all__ = ["Services"]


class Services:
    """What the routes work with. `is_draining`: set at the first SIGTERM; `closing`: streams have to end."""

    def __init__(self, supervisor: Supervisor, settings: HttpSettings) -> None:
        self.supervisor = supervisor
        self.settings = settings
        self.metrics = Metrics(supervisor.status)
        self.body_budget = BodyBudget(settings.max_total_body_bytes)
        self.created = int(time.time())
        self.is_draining = False
        self.closing = asyncio.Event()

    @property
    def config(self) -> GatewayConfig:
        """The configuration in use."""
        return self.supervisor.config

    def ticket(self, name: str) -> Ticket:
        """As Supervisor.ticket; none is given while draining."""
        self._check_open()
        return self.supervisor.ticket(name)

    async def load(self, name: str) -> None:
        """As Supervisor.load; nothing is loaded while draining."""
        self._check_open()
        await self.supervisor.load(name)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return sum(status.running + status.waiting for status in self.supervisor.status())

    def _check_open(self) -> None:
        if self.is_draining:
            raise GatewayStoppingError("", "one that is shutting down", 5, "use another one")
