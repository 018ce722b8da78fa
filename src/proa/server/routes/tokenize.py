"""POST /tokenize and /detokenize (also under /v1)."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from proa.core.errors import UserError
from proa.server.protocol import DetokenizeRequest, TokenizeRequest
from proa.server.request_body import parse_body, services_of

__all__ = ["router"]

router = APIRouter()


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, as generation would see them."""
    services = services_of(request)
    body = await parse_body(request, TokenizeRequest)
    services.check_model(body.model)
    frontend = services.frontend
    if body.messages:
        turn = await frontend.in_worker(body.turn)
        tokens = (await frontend.encode_chat(turn, max_tokens=None)).token_ids
    else:
        tokens = await frontend.encode_text(body.text, max_tokens=None, add_special_tokens=body.add_special_tokens)
    ready = services.client.ready
    max_model_len = ready.max_model_len if ready is not None else None

    def encode() -> bytes:
        answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [frontend.tokenizer.token_text(token_id) for token_id in tokens]
        return msgspec.json.encode(answer)

    return Response(await frontend.in_worker(encode), media_type="application/json")


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    services = services_of(request)
    body = await parse_body(request, DetokenizeRequest)
    services.check_model(body.model)
    vocab_size = services.frontend.tokenizer.vocab_size
    if body.tokens and (largest := max(body.tokens)) >= vocab_size:
        raise UserError("tokens", f"token ids below {vocab_size}", largest)
    text = await services.frontend.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
