"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from proa.server.chat_plan import plan_chat
from proa.server.request_body import parse_body
from proa.server.respond import respond
from proa.server.responses_format import ResponsesFormat
from proa.server.responses_request import ResponsesRequest

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a conversation; nothing is stored."""
    body = await parse_body(request, ResponsesRequest)
    plan = await plan_chat(request, body, "resp_")
    return await respond(request, plan, ResponsesFormat(plan, body), stream=bool(body.stream))
