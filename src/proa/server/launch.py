"""Runs the API process: HTTP server, engine supervisor and signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from proa.core.errors import ProaError
from proa.ipc.messages import FromEngine, Ready
from proa.server.app import create_app
from proa.server.config import ServerConfig
from proa.server.engine_client import EngineClient
from proa.server.engine_process import EngineProcess, EngineState, EngineStatus, RestartPolicy
from proa.server.frontend import Frontend
from proa.server.http_protocol import ConnectionLimits
from proa.server.http_server import HttpServer, base_url, bind, http_server, is_loopback
from proa.server.metrics import Metrics
from proa.server.services import Services

__all__ = ["EXIT_ENGINE_FAILED", "EXIT_USER_ERROR", "ServeResult", "serve"]

logger = logging.getLogger("proa.server")

EXIT_ENGINE_FAILED = 1
EXIT_USER_ERROR = 3


@dataclass(frozen=True, slots=True)
class ServeResult:
    """How serving ended: 0, EXIT_USER_ERROR or EXIT_ENGINE_FAILED, and for the last two a message for the user.

    is_shortage: the model does not fit this machine's memory.
    """

    exit_code: int
    message: str = ""
    is_shortage: bool = False


def serve(
    config: ServerConfig,
    engine_command: list[str],
    engine_config_json: bytes,
    *,
    on_status: Callable[[EngineStatus], None] | None = None,
    on_ready: Callable[[Ready], None] | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> ServeResult:
    """Serve until a signal or until the engine cannot start. Must run in the main thread.

    Args:
        engine_command: program and arguments of the engine process.
        engine_config_json: the engine's configuration; addresses and parent_pid are filled in here.
        on_status: told about every change of the engine's state and load progress, on the event loop: must not block.
        on_ready: told what each engine says of itself when it takes requests.
        on_listening: told the base URL once requests are accepted (the engine may still be loading).

    Raises:
        ConfigError: the address cannot be bound, or the engine configuration is no JSON object.
    """
    listener = bind(config.host, config.port)
    url = base_url(listener)
    if config.api_key is None and not is_loopback(listener):
        logger.warning("listening on %s without an API key: everyone who reaches it can use it", url)
    process = _ApiProcess(config, engine_command, engine_config_json, on_status or _ignore, on_ready or _ignore)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run(listener, lambda: (on_listening or _ignore)(url)))


class _ApiProcess:
    """The parts of the process and the order in which they start and end."""

    def __init__(
        self,
        config: ServerConfig,
        command: list[str],
        engine_config: bytes,
        on_status: Callable[[EngineStatus], None],
        on_ready: Callable[[Ready], None],
    ) -> None:
        self._config = config
        self._on_status = on_status
        self._on_ready = on_ready
        self._metrics = Metrics(config.model_name)
        self._engine = EngineProcess(
            command,
            engine_config,
            policy=RestartPolicy(config.restart_backoff, config.max_restart_backoff, config.max_start_attempts),
            watchdog_timeout=config.watchdog_timeout,
            on_message=self._engine_message,
            on_down=self._engine_down,
            on_status=self._engine_status,
        )
        self._client = EngineClient(self._engine.send, max_queued=config.max_queued_requests)
        self._client.on_stats = self._metrics.engine_stats
        self._frontend = Frontend(
            config.model_path,
            config.chat_template,
            expert_path=config.expert_path,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._services = Services(config, self._client, self._frontend, self._metrics)
        self._drain_task: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket, on_started: Callable[[], None]) -> ServeResult:
        server = self._http_server(is_loopback(listener), on_started)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, server)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        engine = asyncio.create_task(self._engine.run())
        frontend = asyncio.create_task(self._load_frontend())
        try:
            await asyncio.wait([serving, engine, frontend], return_when=asyncio.FIRST_COMPLETED)
            while not serving.done() and not engine.done() and _result_of(frontend) is None:
                await asyncio.wait([serving, engine], return_when=asyncio.FIRST_COMPLETED)
            return self._result(serving, engine, frontend)
        finally:
            self._client.fail_all("the server is shutting down")
            server.should_exit = True
            for task in (engine, frontend):
                task.cancel()
            grammars = self._services.grammars.close()
            await asyncio.gather(serving, engine, frontend, grammars, return_exceptions=True)
            self._frontend.close()

    def _http_server(self, on_loopback: bool, on_started: Callable[[], None]) -> HttpServer:
        config = self._config
        limits = ConnectionLimits(
            max_header_bytes=config.max_header_bytes,
            max_header_fields=config.max_header_fields,
            max_connections=config.max_connections,
            header_timeout=config.header_timeout,
            body_idle_timeout=config.body_idle_timeout,
            body_timeout=config.body_timeout,
        )
        app = create_app(self._services, on_loopback=on_loopback)
        return http_server(app, limits, config.keep_alive_timeout, on_started)

    async def _load_frontend(self) -> ServeResult | None:
        try:
            await self._frontend.load()
            _ = self._services.sampling_defaults
        except ProaError as error:
            return ServeResult(EXIT_USER_ERROR, str(error))
        return None

    def _result(
        self,
        serving: asyncio.Task[None],
        engine: asyncio.Task[None],
        frontend: asyncio.Task[ServeResult | None],
    ) -> ServeResult:
        if (failed := _result_of(frontend)) is not None:
            return failed
        if engine.done():
            engine.result()
            status = self._engine.status
            code = EXIT_USER_ERROR if status.user_error else EXIT_ENGINE_FAILED
            return ServeResult(code, status.message, status.is_shortage)
        serving.result()
        return ServeResult(0)

    def _on_signal(self, server: HttpServer) -> None:
        if self._services.is_draining:
            logger.warning("second signal: ending at once")
            self._engine.kill()
            self._engine.remove_directory()
            os._exit(0)
        self._services.is_draining = True
        self._drain_task = asyncio.create_task(self._drain(server))

    async def _drain(self, server: HttpServer) -> None:
        """Let running requests finish, then end the HTTP server. New ones are refused meanwhile."""
        timeout = self._config.drain_timeout
        logger.info("draining %d sequences for at most %.0f s", self._client.num_in_flight, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._client.idle()
        self._client.fail_all("the server is shutting down")
        server.should_exit = True

    def _engine_message(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._metrics.engine_ready(message)
            self._on_ready(message)
        self._client.handle(message)

    def _engine_down(self, reason: str) -> None:
        self._metrics.engine_down()
        self._client.engine_down(reason)

    def _engine_status(self, status: EngineStatus) -> None:
        if status.state is not EngineState.READY:
            logger.debug("engine: %s", status)
        self._services.status = status
        self._metrics.engine_status(status)
        self._on_status(status)


def _ignore(_: object) -> None:
    pass


def _result_of(task: asyncio.Task[ServeResult | None]) -> ServeResult | None:
    return task.result() if task.done() else None
