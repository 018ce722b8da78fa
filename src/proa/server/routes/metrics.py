"""GET /metrics in the Prometheus text format."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from proa.server.request_body import services_of

__all__ = ["router"]

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics."""
    return Response(services_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
