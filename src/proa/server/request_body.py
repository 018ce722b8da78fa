"""Reads and validates a request body within the limits of memory."""

from __future__ import annotations

import re
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from proa.core.errors import UserError
from proa.server.errors import BodyTooLargeError, invalid_request
from proa.server.services import Services
from proa.server.sse import ClientGoneError

__all__ = ["parse_body", "services_of"]

# Above this, parsing takes longer than a stream should wait.
_INLINE_BYTES = 64 * 1024

# Parsing keeps the interpreter's lock, and a list or object takes a hundred times the room of its two bytes: what no
# honest request needs is refused unparsed.
_MAX_ITEMS = 2_000_000
_MAX_MEMBERS = 200_000
_MAX_CONTAINERS = 100_000
# A JSON string, or the unfinished one at the end. Possessive, so that it is linear whatever it is given.
_JSON_STRING = re.compile(rb'"(?>[^"\\]+|\\.)*+"?', re.DOTALL)

_Model = TypeVar("_Model", bound=BaseModel)


def services_of(request: Request) -> Services:
    """The process's services."""
    services: Services = request.app.state.services
    return services


async def parse_body(request: Request, model: type[_Model]) -> _Model:
    """The body as `model`.

    Raises:
        UserError: not JSON, or a field is wrong.      BodyTooLargeError: over the limit.
        UnavailableError: too many large bodies at one time.
    """
    services = services_of(request)
    chunks: list[bytes] = []
    request.state.body_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        # The gate gives it back when the answer begins: until then the body lives on as objects made from it.
        request.state.body_bytes += len(chunk)
        services.body_budget.take(len(chunk))
        if request.state.body_bytes > services.config.max_body_bytes:
            raise BodyTooLargeError(services.config.max_body_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            break
    data = b"".join(chunks)
    chunks.clear()
    if len(data) <= _INLINE_BYTES:
        return _validate(model, data)
    return await services.frontend.in_worker(_validate, model, data)


def _validate(model: type[_Model], data: bytes) -> _Model:
    if _is_excessive(data) and _is_excessive(_JSON_STRING.sub(b"", data)):
        raise UserError("body", f"at most {_MAX_ITEMS} items in {_MAX_CONTAINERS} lists", "more")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise invalid_request(error) from None
    except RecursionError:
        raise UserError("body", "JSON of reasonable depth", "deep nesting") from None


def _is_excessive(data: bytes) -> bool:
    return (
        data.count(b",") > _MAX_ITEMS
        or data.count(b":") > _MAX_MEMBERS
        or data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS
    )
