"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from proa.server.chat_format import ChatFormat
from proa.server.chat_plan import plan_chat
from proa.server.protocol import ChatCompletionRequest
from proa.server.request_body import parse_body, services_of
from proa.server.respond import respond

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await parse_body(request, ChatCompletionRequest)
    plan = await plan_chat(request, body, "chatcmpl-")
    tokenizer = services_of(request).frontend.tokenizer
    answer = ChatFormat(plan, tokenizer, with_logprobs=bool(body.logprobs), options=body.stream_options)
    return await respond(request, plan, answer, stream=bool(body.stream))
