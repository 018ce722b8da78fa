"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from proa.server.chat_format import ChatFormat
from proa.server.generation import GenerationPlan, new_id
from proa.server.protocol import ChatCompletionRequest
from proa.server.request_body import parse_body, services_of
from proa.server.respond import respond

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    services = services_of(request)
    body = await parse_body(request, ChatCompletionRequest)
    services.check_model(body.model)
    limits = services.require_ready()
    prompt = await services.frontend.encode_chat(body, max_tokens=limits.max_model_len)
    sampling = services.sampling(
        body, limits, [prompt.token_ids], max_new_tokens=body.max_new_tokens, num_logprobs=body.num_logprobs
    )
    plan = GenerationPlan(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=body.model or services.config.model_name,
        prompts=[prompt.token_ids],
        sampling=sampling,
        n=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        reading=prompt.reading,
        names=frozenset({request.state.request_id, *([body.rid] if body.rid else [])}),
    )
    answer = ChatFormat(plan, services.frontend.tokenizer, with_logprobs=bool(body.logprobs))
    return await respond(request, plan, answer, stream=bool(body.stream), options=body.stream_options)
