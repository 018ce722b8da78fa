"""GET /livez, /readyz, /health, /health_generate and /ping.

/livez: 200 while the process runs. The others: 200 while a request would be taken, else 503 with the engine's state.
/health_generate generates nothing, other than SGLang's: an engine is ready once its kernels computed known results, and
one that hangs is noticed by its silence.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from proa.server.request_body import services_of

__all__ = ["router"]

router = APIRouter()


@router.get("/livez")
async def live() -> dict[str, str]:
    """Whether the process runs."""
    return {"status": "ok"}


@router.get("/readyz")
@router.get("/health")
@router.get("/health_generate")
@router.get("/ping")
async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken."""
    services = services_of(request)
    status = services.status
    body: dict[str, Any] = {
        "status": "draining" if services.is_draining else "ok" if services.is_ready else "unavailable",
        "engine": status.state.value,
    }
    if status.bytes_total:
        body["load"] = {"bytes_done": status.bytes_done, "bytes_total": status.bytes_total}
    return JSONResponse(body, 200 if services.is_ready else 503)
