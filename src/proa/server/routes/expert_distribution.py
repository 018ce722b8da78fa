"""SGLang's routes that record which experts tokens go to, for `--expert-location`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from proa.server.errors import error_body
from proa.server.request_body import services_of

__all__ = ["router"]

router = APIRouter()


@router.api_route("/start_expert_distribution_record", methods=["GET", "POST"])
async def start(request: Request) -> JSONResponse:
    """Forgets what was recorded, and begins."""
    await services_of(request).client.record_experts("start")
    return JSONResponse({"success": True})


@router.api_route("/stop_expert_distribution_record", methods=["GET", "POST"])
async def stop(request: Request) -> JSONResponse:
    """What was recorded stays for a dump."""
    await services_of(request).client.record_experts("stop")
    return JSONResponse({"success": True})


@router.api_route("/dump_expert_distribution_record", methods=["GET", "POST"])
async def dump(request: Request) -> JSONResponse:
    """`logical_count`, tokens by MoE layer and expert, which are then forgotten; 409 when nothing was recorded."""
    counts = await services_of(request).client.record_experts("dump")
    if counts is not None:
        return JSONResponse({"logical_count": counts})
    message = "[expert distribution] expected a recording, got none. Fix: POST /start_expert_distribution_record first"
    return JSONResponse(error_body(message, 409, code="not_recording"), 409)
