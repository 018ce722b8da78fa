"""The way of a chat request from its body to a plan for the engine, the same for every API."""

from __future__ import annotations

import time

from fastapi import Request

from proa.core.errors import UserError
from proa.server.chat_request import ChatRequest
from proa.server.generation import GenerationPlan, new_id
from proa.server.generation_request import ChatBody
from proa.server.request_body import services_of

__all__ = ["plan_chat"]


async def plan_chat(request: Request, body: ChatBody, id_prefix: str) -> GenerationPlan:
    """Render, tokenize and check a request.

    Raises:
        UserError: what cannot be asked of this model.      UnavailableError: no engine.
    """
    services = services_of(request)
    services.check_model(body.model)
    limits = services.require_ready()
    chat = await services.frontend.in_worker(body.chat)
    chat.check_tool_choice()
    _refuse_unsupported(chat)
    where = body.PROMPT_FIELD
    prompt = await services.frontend.encode_chat(chat.turn, max_tokens=limits.max_model_len, where=where)
    sampling = services.sampling(
        body, limits, [prompt.token_ids], max_new_tokens=chat.max_new_tokens, num_logprobs=chat.num_logprobs
    )
    return GenerationPlan(
        id=new_id(id_prefix),
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


def _refuse_unsupported(chat: ChatRequest) -> None:
    """What needs constrained generation."""
    if chat.tool_choice.mode == "required":
        raise UserError("tool_choice", "none or auto", "a required call", code="unsupported_parameter")
    if not chat.parallel_tool_calls and chat.turn.tools:
        raise UserError("parallel_tool_calls", "true", "false", "remove it", code="unsupported_parameter")
    if (chat.response_format or {}).get("type", "text") != "text":
        raise UserError("response_format", "type text", "another one", "remove it", code="unsupported_parameter")
