"""The gateway's ASGI application: its own routes, and the proxy for all others."""

from __future__ import annotations

from email.utils import formatdate

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa.core.errors import ProaError
from proa.gateway import routes, status_page
from proa.gateway.proxy import Proxy, ProxyLimits
from proa.gateway.services import Services
from proa.server.errors import RouteError, error_response
from proa.server.gate import Gate
from proa.server.own_pages import OwnPages

__all__ = ["create_app"]

_OPEN_PATHS = ("/livez", status_page.PATH)


def create_app(services: Services, *, on_loopback: bool) -> ASGIApp:
    """The application behind its gate. `on_loopback`: it is reached from this machine only."""
    settings = services.settings
    limits = ProxyLimits(
        max_body_bytes=settings.max_body_bytes,
        progress_interval=settings.progress_interval,
        response_header_timeout=settings.response_header_timeout,
    )
    by_body = Proxy(services, services.body_budget, limits, services.metrics)
    by_path = Proxy(services, services.body_budget, limits, services.metrics, by_path=True)
    app = Starlette(
        routes=[
            *routes.ROUTES,
            Route(status_page.PATH, status_page.show),
            Route("/upstream/{model}/{path:path}", by_path),
            # Whatever names a model in its body belongs to an engine; which paths there are is for it to say.
            Route("/{path:path}", by_body, methods=["POST"]),
        ],
        exception_handlers={ProaError: _on_error, HTTPException: _on_http_error, Exception: _on_error},
    )
    app.state.services = services
    gate = Gate(
        app,
        services.body_budget,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        open_paths=_OPEN_PATHS,
    )
    # Whoever has the key may send it from any page.
    if settings.api_key is None:
        return _Dated(OwnPages(gate, on_loopback=on_loopback, open_paths=_OPEN_PATHS))
    return _Dated(gate)


class _Dated:
    """Dates the responses that have no date: those of engines keep their own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                if all(name != b"date" for name, _ in headers):
                    headers.append((b"date", formatdate(usegmt=True).encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_dated)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    return error_response(RouteError(error.status_code, request.method, path), path, error.headers)
