"""POST or GET /flush_cache: empties the prefix cache."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from proa.server.errors import error_body
from proa.server.request_body import services_of

__all__ = ["router"]

router = APIRouter()


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> JSONResponse:
    """200 when the cache is empty now, 409 while requests use it."""
    if await services_of(request).client.flush_cache():
        return JSONResponse({"success": True})
    message = "[flush_cache] expected no running requests, got some. Fix: retry when they have finished"
    return JSONResponse(error_body(message, 409, code="cache_in_use"), 409)
