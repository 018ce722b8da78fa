"""The FastAPI application: routes and error handlers."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from proa.core.errors import ProaError
from proa.server.errors import RouteError, error_response
from proa.server.gate import Gate
from proa.server.own_pages import OwnPages
from proa.server.routes import (
    abort_request,
    chat_completions,
    completions,
    expert_distribution,
    flush_cache,
    health,
    messages,
    metrics,
    models,
    responses,
    server_info,
    tokenize,
)
from proa.server.services import Services

__all__ = ["create_app"]

_ROUTES = (
    chat_completions, responses, messages, completions, models, tokenize, health, metrics, server_info, flush_cache,
    abort_request, expert_distribution,
)  # fmt: skip


def create_app(services: Services, *, on_loopback: bool) -> ASGIApp:
    """The application behind its gate. `on_loopback`: it is reached from this machine only."""
    # No generated pages: they would load scripts from elsewhere, and bodies are validated by hand.
    app = FastAPI(title="proa", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.services = services
    for module in _ROUTES:
        app.include_router(module.router)
    app.add_exception_handler(ProaError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    config = services.config
    gate = Gate(app, services.body_budget, api_key=config.api_key, max_body_bytes=config.max_body_bytes)
    # Whoever has the key may send it from any page.
    return OwnPages(gate, on_loopback=on_loopback) if config.api_key is None else gate


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    return error_response(RouteError(error.status_code, request.method, path), path, error.headers)
