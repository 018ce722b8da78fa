"""Runs the gateway process: HTTP server, supervisor and signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import uvloop

from proa.core.errors import ConfigError
from proa.gateway.app import create_app
from proa.gateway.config import GatewayConfig
from proa.gateway.config_file import follow_config
from proa.gateway.http_settings import HttpSettings
from proa.gateway.notify import notify, ping_watchdog
from proa.gateway.services import Services
from proa.gateway.supervisor import Supervisor
from proa.server.http_protocol import ConnectionLimits
from proa.server.http_server import HttpServer, base_url, bind, http_server, is_loopback

__all__ = ["run"]

logger = logging.getLogger("proa.gateway")

_DRAIN_POLL_SECONDS = 0.1
_MAX_DESCRIPTORS = 65536


def run(
    config: GatewayConfig,
    settings: HttpSettings,
    *,
    config_path: Path | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Run until a signal. Must run in the main thread.

    Args:
        config_path: the file `config` was read from; it is used again when it changes, but for the address.
        on_listening: told the base URL once requests are taken.

    Raises:
        ConfigError: the address cannot be bound.
    """
    _raise_descriptor_limit()
    listener = bind(config.host, config.port)
    url = base_url(listener)
    if settings.api_key is None and not is_loopback(listener):
        logger.warning("listening on %s without an API key: everyone who reaches it can use it", url)

    def listening() -> None:
        notify("READY=1")
        if on_listening is not None:
            on_listening(url)

    async def main() -> None:
        services = Services(Supervisor(config), settings)
        server = http_server(
            create_app(services, on_loopback=is_loopback(listener)),
            _limits(settings),
            settings.keep_alive_timeout,
            listening,
            # A response that an engine broke off is left incomplete on purpose: uvicorn would call that an error.
            log_level="critical",
            date_header=False,
        )
        await _Process(services, server, config_path).run(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _raise_descriptor_limit() -> None:
    """A request takes two: one to its client, one to its engine. Shells often allow 1024 until asked for more."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))


def _limits(settings: HttpSettings) -> ConnectionLimits:
    return ConnectionLimits(
        max_header_bytes=settings.max_header_bytes,
        max_header_fields=settings.max_header_fields,
        max_connections=settings.max_connections,
        header_timeout=settings.header_timeout,
        body_idle_timeout=settings.body_idle_timeout,
        body_timeout=settings.body_timeout,
        write_timeout=settings.write_timeout,
    )


class _Process:
    """The order in which the parts start and end."""

    def __init__(self, services: Services, server: HttpServer, config_path: Path | None) -> None:
        self._services = services
        self._server = server
        self._config_path = config_path
        self._draining: asyncio.Task[None] | None = None

    async def run(self, listener: object) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal)
        supervisor = self._services.supervisor
        helpers = [asyncio.create_task(ping_watchdog()), asyncio.create_task(self._count_events())]
        if self._config_path is not None:
            following = follow_config(self._config_path, supervisor.reconfigure, self._refuse_config)
            helpers.append(asyncio.create_task(following))
        try:
            await supervisor.start()
            await self._server.serve(sockets=[listener])  # type: ignore[list-item]
        finally:
            notify("STOPPING=1")
            await supervisor.close()
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def _on_signal(self) -> None:
        if self._services.is_draining:
            logger.warning("second signal: ending at once")
            os._exit(0)  # engines die with their parent
        self._services.is_draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Let requests finish, then end the HTTP server. New ones are refused meanwhile."""
        notify("STOPPING=1")
        services = self._services
        timeout = services.settings.drain_timeout
        logger.info("draining %d requests for at most %.0f s", services.num_requests, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while services.num_requests:  # noqa: ASYNC110 - the supervisor has no event for it
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        # What is left gets an error from here, where closing its connection would say nothing.
        await services.supervisor.close()
        services.closing.set()
        self._server.should_exit = True

    def _refuse_config(self, error: ConfigError) -> None:
        self._services.supervisor.events.publish("config", ok=False, error=str(error))

    async def _count_events(self) -> None:
        with self._services.supervisor.events.subscribe() as events:
            async for event in events:
                self._services.metrics.observe(event)
