"""The way of a chat request from its body to a plan for the engine, the same for every API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request

from proa.chat.grammar.build import AnswerRules, build_constraint
from proa.server.chat_request import ChatRequest
from proa.server.generation import GenerationPlan, new_id
from proa.server.generation_request import ChatBody, GenerationRequest
from proa.server.request_body import services_of

__all__ = ["answer_rules", "plan_chat"]


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
    where = body.PROMPT_FIELD
    prompt = await services.frontend.encode_chat(chat.turn, max_tokens=limits.max_model_len, where=where)
    sampling = services.sampling(
        body, limits, [prompt.token_ids], max_new_tokens=chat.max_new_tokens, num_logprobs=chat.num_logprobs
    )
    rules = answer_rules(body, chat)
    built = await services.frontend.in_worker(build_constraint, rules, prompt.reading)
    constraint = await services.grammars.constraint(built)
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
        constraint=constraint,
        names=frozenset({request.state.request_id, *([body.rid] if body.rid else [])}),
    )


def answer_rules(body: GenerationRequest, chat: ChatRequest | None = None) -> AnswerRules:
    """What a request asks of its answer."""
    rules = AnswerRules(
        response_format=body.response_format, regex=body.regex, ebnf=body.ebnf, json_schema=body.json_schema
    )
    if chat is None:
        return rules
    choice = chat.tool_choice
    return replace(
        rules,
        tools=[tool for tool in chat.turn.tools if choice.allowed is None or _name_of(tool) in choice.allowed],
        is_limited=choice.allowed is not None,
        mode=choice.mode,
        name=choice.name,
        parallel_calls=chat.parallel_tool_calls,
        response_format=chat.response_format,
    )


def _name_of(tool: Mapping[str, Any]) -> Any:
    return tool["function"]["name"] if "function" in tool else None
