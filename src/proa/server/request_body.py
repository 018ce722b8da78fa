"""Reads and validates a request body within the limits of memory."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from proa.core.errors import UnavailableError, UserError
from proa.server.errors import BodyTooLargeError, invalid_request
from proa.server.services import Services
from proa.server.sse import ClientGoneError

__all__ = ["parse_body", "services_of"]

# Above this, parsing takes longer than a stream should wait.
_INLINE_BYTES = 64 * 1024

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
    held = 0
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk: bytes = message.get("body", b"")
            held += len(chunk)
            services.body_bytes += len(chunk)
            if held > services.config.max_body_bytes:
                raise BodyTooLargeError(services.config.max_body_bytes)
            if services.body_bytes > services.config.max_total_body_bytes:
                raise UnavailableError("body", "less data in flight", "too many large requests", "retry later")
            chunks.append(chunk)
            if not message.get("more_body", False):
                break
        data = b"".join(chunks)
        chunks.clear()
        if len(data) <= _INLINE_BYTES:
            return _validate(model, data)
        return await services.frontend.in_worker(_validate, model, data)
    finally:
        services.body_bytes -= held


def _validate(model: type[_Model], data: bytes) -> _Model:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise invalid_request(error) from None
    except RecursionError:
        raise UserError("body", "JSON of reasonable depth", "deep nesting") from None
