"""POST /v1/completions."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from proa.chat.grammar.build import build_constraint
from proa.core.errors import UserError
from proa.server.chat_plan import answer_rules
from proa.server.completion_format import CompletionFormat
from proa.server.generation import GenerationPlan, new_id
from proa.server.protocol import CompletionRequest
from proa.server.request_body import parse_body, services_of
from proa.server.respond import respond
from proa.server.sampling import SequenceLimits
from proa.server.services import Services

__all__ = ["router"]

router = APIRouter()

# OpenAI's default for this route.
_DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    services = services_of(request)
    body = await parse_body(request, CompletionRequest)
    services.check_model(body.model)
    limits = services.require_ready()
    prompts = await _encode(services, body, limits)
    sampling = services.sampling(
        body,
        limits,
        prompts,
        max_new_tokens=body.max_tokens if body.max_tokens is not None else _DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
    )
    built = await services.frontend.in_worker(build_constraint, answer_rules(body), None)
    plan = GenerationPlan(
        id=new_id("cmpl-"),
        created=int(time.time()),
        model=body.model or services.config.model_name,
        prompts=prompts,
        sampling=sampling,
        constraint=await services.grammars.constraint(built),
        n=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        names=frozenset({request.state.request_id, *([body.rid] if body.rid else [])}),
    )
    answer = CompletionFormat(
        plan,
        services.frontend.tokenizer,
        with_logprobs=body.logprobs is not None,
        echoes=await _echoes(services, body) if body.echo else (),
        options=body.stream_options,
    )
    return await respond(request, plan, answer, stream=bool(body.stream))


async def _encode(services: Services, body: CompletionRequest, limits: SequenceLimits) -> list[list[int]]:
    prompts: list[list[int]] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            token_ids = await services.frontend.encode_text(
                prompt, max_tokens=limits.max_model_len, add_special_tokens=body.add_special_tokens
            )
        else:
            token_ids = prompt
        if not token_ids:
            raise UserError("prompt", "a prompt of one token or more", "an empty one")
        if (largest := max(token_ids)) >= limits.vocab_size:
            raise UserError("prompt", f"token ids below {limits.vocab_size}", largest)
        prompts.append(token_ids)
    return prompts


async def _echoes(services: Services, body: CompletionRequest) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else await services.frontend.decode(prompt, skip_special_tokens=False)
        for prompt in body.prompts
    ]
