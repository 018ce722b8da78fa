"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from proa.server.anthropic_format import MessagesFormat
from proa.server.anthropic_request import MessagesRequest
from proa.server.chat_plan import plan_chat
from proa.server.request_body import parse_body, services_of
from proa.server.respond import respond

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    body = await parse_body(request, MessagesRequest)
    plan = await plan_chat(request, body, "msg_")
    return await respond(request, plan, MessagesFormat(plan), stream=bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens the prompt of a message has."""
    services = services_of(request)
    body = await parse_body(request, MessagesRequest)
    services.check_model(body.model)
    turn = await services.frontend.in_worker(body.turn)
    return {"input_tokens": len((await services.frontend.encode_chat(turn, max_tokens=None)).token_ids)}
