"""Every error as the body of the API it came from.

OpenAI: {"error": {"message", "type", "param", "code"}}; Anthropic: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from proa.core.errors import ConfigError, ContextLengthError, ProaError, QueueFullError, UnavailableError, UserError

__all__ = [
    "AuthenticationError",
    "BodyTooLargeError",
    "ErrorShape",
    "ModelNotFoundError",
    "PromptTooLongError",
    "RouteError",
    "anthropic_error",
    "error_body",
    "error_response",
    "error_shape",
    "invalid_request",
    "openai_error",
]

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# Pydantic adds the branch of a union to the path of an error; clients know only the fields.
_UNION_BRANCH = re.compile(r"^(str|int|float|bool|bytes|dict|list\[.*|.*\[.*\]|[a-z-]+\(.*|[A-Z]\w*)$")


class AuthenticationError(UserError):
    """No key, or a wrong one."""

    http_status = 401

    def __init__(self) -> None:
        super().__init__(
            "api_key",
            "the server's API key",
            "none or another one",
            "send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
        )


class BodyTooLargeError(UserError):
    """A request body over the limit."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__("body", f"at most {limit} bytes", "more", "send a shorter request", code="request_too_large")


class ModelNotFoundError(UserError):
    """A model this server does not serve."""

    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__("model", " or ".join(known), name[:200], "see /v1/models", code="model_not_found")


class PromptTooLongError(UserError):
    """A prompt that cannot fit however it is tokenized. `fewest`: tokens it has at least."""

    def __init__(self, where: str, num_characters: int, fewest: int, limit: int) -> None:
        got = f"{num_characters} characters, which are {fewest} tokens or more"
        super().__init__(where, f"at most {limit} tokens", got, "shorten the prompt", code="context_length_exceeded")
        self.prompt_tokens = fewest
        self.max_tokens = 0
        self.limit = limit


class RouteError(UserError):
    """A path, or a method of it, that is not there."""

    def __init__(self, status: int, method: str, path: str) -> None:
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_value")
        super().__init__(path[:200], "a route of this server", f"{method} (status {status})", code=code)
        self.http_status = status


def error_body(message: str, status: int, *, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """The body of an error response or event."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code if code is not None else status}}


def openai_error(error: Exception) -> dict[str, Any]:
    """The body for `error` in OpenAI's APIs."""
    return describe(error)[1]


def anthropic_error(error: Exception) -> dict[str, Any]:
    """The body for `error` in Anthropic's API."""
    status, body, _ = describe(error)
    message = body["error"]["message"]
    if isinstance(error, ContextLengthError | PromptTooLongError):
        # Clients read the counts from these words, and shorten their answer or the conversation by them.
        prompt, answer, limit = error.prompt_tokens, error.max_tokens, error.limit
        message = (
            f"prompt is too long: {prompt} tokens > {limit} maximum"
            if prompt >= limit
            else f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ErrorShape = Callable[[Exception], dict[str, Any]]


def error_shape(path: str) -> ErrorShape:
    """How the API at `path` writes errors."""
    return anthropic_error if path.startswith("/v1/messages") else openai_error


def error_response(error: Exception, path: str = "", headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response of the API at `path`; what is not meant for clients becomes a 500 with a generic text."""
    status, _, more = describe(error)
    return JSONResponse(error_shape(path)(error), status, headers={**more, **(headers or {})})


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """HTTP status, body and extra headers for `error`."""
    if isinstance(error, QueueFullError):
        headers = {"retry-after": str(error.retry_after_s)}
        return 429, error_body(str(error), 429, param=None, code=error.code), headers
    if isinstance(error, AuthenticationError):
        return 401, error_body(str(error), 401, code=error.code), {"www-authenticate": "Bearer"}
    if isinstance(error, UserError):
        status = error.http_status
        return status, error_body(str(error), status, param=error.param, code=error.code), {}
    if isinstance(error, UnavailableError):
        return 503, error_body(str(error), 503, code=error.code), {"retry-after": str(error.retry_after_s)}
    if isinstance(error, ProaError) and not isinstance(error, ConfigError):
        return 400, error_body(str(error), 400, param=error.where), {}
    return 500, error_body("internal server error; the server's log has the details", 500, code="internal_error"), {}


def invalid_request(error: ValidationError) -> UserError:
    """The first thing that is wrong with a request body."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"] if not _UNION_BRANCH.match(str(part))]
    param = ".".join(path)[:200] or "body"
    expected = first["msg"]
    for prefix in ("Input should be ", "Value error, "):
        expected = expected.removeprefix(prefix)
    if first["type"] == "missing":
        return UserError(param, "a value", "none", code="missing_required_parameter")
    if first["type"] == "json_invalid":
        return UserError("body", "a JSON object", first["msg"][:200], code="invalid_json")
    if first["type"] == "too_short":
        expected = "at least one item"
    return UserError(param, expected[:500], _shorten(first.get("input")))


def _shorten(value: Any) -> str:
    if isinstance(value, str | int | float | bool) or value is None:
        try:
            text = repr(value)
        except ValueError:  # an integer of more digits than Python prints
            return "a huge integer"
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__} of {len(value)} items" if hasattr(value, "__len__") else type(value).__name__
