"""The gateway's own routes: health, models, logs, events, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proa.core.errors import UserError
from proa.gateway.routing import names, resolve
from proa.gateway.services import Services
from proa.gateway.status import ModelStatus
from proa.server.errors import openai_error
from proa.server.sse import EventStream, until_disconnect

__all__ = ["ROUTES"]

_KEEPALIVE_SECONDS = 10.0
_DEFAULT_LINES = 200
_MAX_COMMAND_BYTES = 64 * 1024

_Item = TypeVar("_Item")


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /models/load and /models/unload. `now`: running requests are cut off."""

    model: str
    now: bool = False


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def live(_: Request) -> Response:
    """GET /livez: the process runs."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /readyz, /health: whether requests are taken; models may still have to be loaded for them."""
    services = _services(request)
    states = {status.name: status.state.value for status in services.supervisor.status()}
    body = {"status": "draining" if services.is_draining else "ok", "models": states}
    return JSONResponse(body, 503 if services.is_draining else 200)


async def metrics(request: Request) -> Response:
    """GET /metrics: the Prometheus text format."""
    return Response(_services(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


async def list_models(request: Request) -> Response:
    """GET /v1/models: every model and alias, as OpenAI lists them."""
    services = _services(request)
    return JSONResponse({"object": "list", "data": [_model(services, name) for name in names(services.config)]})


async def show_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    services = _services(request)
    return JSONResponse(_model(services, request.path_params["name"]))


def _model(services: Services, name: str) -> dict[str, Any]:
    route = resolve(services.config, name)
    state = next(s.state.value for s in services.supervisor.status() if s.name == route.model.name)
    entry = {"id": name, "object": "model", "created": services.created, "owned_by": "proa", "status": state}
    if route.model.context_length is not None:
        entry["max_model_len"] = route.model.context_length
    return entry


async def status(request: Request) -> Response:
    """GET /models: everything there is to know about each model's engine."""
    return JSONResponse({"models": [_status(entry) for entry in _services(request).supervisor.status()]})


def _status(entry: ModelStatus) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(entry)
    if entry.progress is not None:
        built["progress"] = {**built["progress"], "fraction": entry.progress.fraction, "text": str(entry.progress)}
    return built


async def load(request: Request) -> Response:
    """POST /models/load {"model": NAME}: answers when it is ready. Who leaves before no longer waits for it."""
    command = await _command(request)
    await until_disconnect(request.receive, _services(request).load(command.model))
    return JSONResponse({"model": command.model, "status": "ready"})


async def unload(request: Request) -> Response:
    """POST /models/unload {"model": NAME, "now": false}: answers when it is gone."""
    command = await _command(request)
    await _services(request).supervisor.unload(command.model, now=command.now)
    return JSONResponse({"model": command.model, "status": "stopped"})


async def _command(request: Request) -> _Command:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_COMMAND_BYTES:
            raise UserError("body", f"at most {_MAX_COMMAND_BYTES} bytes", "more")
    try:
        return msgspec.json.decode(body, type=_Command)
    except msgspec.MsgspecError as error:
        raise UserError("body", 'a JSON object such as {"model": "NAME"}', str(error)) from None


async def logs(request: Request) -> Response:
    """GET /logs/NAME?lines=200&follow=1: what its engine wrote, as text."""
    services = _services(request)
    ring = services.supervisor.log(request.path_params["name"])
    given = request.query_params.get("lines", str(_DEFAULT_LINES))
    if not given.isdecimal() or len(given) > 9:
        raise UserError("lines", "a number", given[:20])
    kind = "text/plain; charset=utf-8"
    if request.query_params.get("follow", "0") in ("0", "false"):
        return Response("".join(f"{line}\n" for line in ring.tail(int(given))), media_type=kind)
    lines = _until_closing(services, ring.follow(int(given)))
    return StreamingResponse(
        (f"{line}\n" async for line in lines), media_type=kind, headers={"x-accel-buffering": "no"}
    )


async def events(request: Request) -> Response:
    """GET /events: server-sent events. First `status` with all models, then `state`, `progress` and `config`."""
    services = _services(request)
    return EventStream(_Events(services), keepalive=_KEEPALIVE_SECONDS, write_timeout=services.settings.write_timeout)


class _Events:
    """An `EventSource` of what happens in the gateway."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def frames(self) -> AsyncGenerator[bytes, None]:
        supervisor = self._services.supervisor
        with supervisor.events.subscribe() as happening:
            yield _frame("status", {"models": [_status(entry) for entry in supervisor.status()]})
            async for event in _until_closing(self._services, happening):
                yield _frame(event.kind, msgspec.to_builtins(event))

    def silence(self) -> bytes:
        return b": \n\n"

    def failure(self, error: Exception) -> bytes:
        return _frame("error", openai_error(error))

    def close(self) -> None:
        pass


def _frame(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


async def _until_closing(services: Services, items: AsyncIterator[_Item]) -> AsyncGenerator[_Item, None]:
    """`items` until the gateway closes: streams without end would hold it up."""
    closing = asyncio.ensure_future(services.closing.wait())
    coming: asyncio.Future[_Item] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(items))
            await asyncio.wait([coming, closing], return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            yield coming.result()
    except StopAsyncIteration:
        return
    finally:
        tasks = [task for task in (closing, coming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


ROUTES = [
    Route("/livez", live),
    Route("/readyz", ready),
    Route("/health", ready),
    Route("/metrics", metrics),
    Route("/v1/models", list_models),
    Route("/v1/models/{name:path}", show_model),
    Route("/models", status),
    Route("/models/load", load, methods=["POST"]),
    Route("/models/unload", unload, methods=["POST"]),
    Route("/logs/{name:path}", logs),
    Route("/events", events),
]
