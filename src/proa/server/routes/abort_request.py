"""POST /abort_request: ends running requests with finish_reason "abort"."""

from __future__ import annotations

from fastapi import APIRouter, Request

from proa.core.errors import UserError
from proa.server.protocol import AbortRequest
from proa.server.request_body import parse_body, services_of

__all__ = ["router"]

router = APIRouter()


@router.post("/abort_request")
async def abort_request(request: Request) -> dict[str, int]:
    """Abort by response id, `rid` or X-Request-Id, or everything with abort_all. An unknown id aborts nothing."""
    body = await parse_body(request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise UserError("rid", "an id, or abort_all: true", "neither")
    return {"aborted": services_of(request).client.abort_named(None if body.abort_all else body.rid)}
