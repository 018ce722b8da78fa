"""The outermost ASGI layer: request id, API key, length limit, and a last resort for errors."""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import logging
import re
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa.server.body_budget import BodyBudget
from proa.server.errors import AuthenticationError, BodyTooLargeError, error_response
from proa.server.sse import ClientGoneError

__all__ = ["Gate"]

logger = logging.getLogger("proa.server")

# Liveness probes carry no secrets, and the answer tells nothing.
_OPEN_PATHS = ("/livez",)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_LARGE_BODY_BYTES = 1024 * 1024
_libc = ctypes.CDLL(None)


def _return_free_memory() -> None:
    """A large prompt takes a hundred times its size while it is tokenized; the allocator would keep that for ever."""
    if hasattr(_libc, "malloc_trim"):  # glibc only
        _libc.malloc_trim(0)


class Gate:
    """Wraps the application. Every path but /livez needs the key, known or not: nothing is open by being forgotten.

    open_paths: the paths that need none to be read.
    """

    def __init__(
        self,
        app: ASGIApp,
        budget: BodyBudget,
        *,
        api_key: str | None,
        max_body_bytes: int,
        open_paths: Collection[str] = _OPEN_PATHS,
    ) -> None:
        self._app = app
        self._budget = budget
        self._api_key = api_key.encode() if api_key else None
        self._max_body_bytes = max_body_bytes
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        started = False
        held_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal started, held_bytes
            if message["type"] == "http.response.start":
                started = True
                held_bytes = state.pop("body_bytes", 0)
                self._budget.give_back(held_bytes)
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", request_id)]}
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            logger.debug("client gone before the answer")
        except Exception as error:
            if not isinstance(error, AuthenticationError | BodyTooLargeError):
                logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if not started:
                await error_response(error, scope["path"])(scope, receive, send_with_id)
        finally:
            rest = state.pop("body_bytes", 0)
            self._budget.give_back(rest)
            if max(held_bytes, rest) >= _LARGE_BODY_BYTES:
                asyncio.get_running_loop().run_in_executor(None, _return_free_memory)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        # What is sent to an open path may be meant for something else than is read there.
        is_open = scope["path"] in self._open_paths and scope["method"] in ("GET", "HEAD")
        if self._api_key is not None and not is_open and not self._is_authorized(headers):
            raise AuthenticationError
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_body_bytes):
            raise BodyTooLargeError(self._max_body_bytes)

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        assert self._api_key is not None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        offered = token.strip() if scheme.lower() == b"bearer" else b""
        # Both are always compared, so that the time tells nothing.
        by_bearer = hmac.compare_digest(offered, self._api_key)
        by_header = hmac.compare_digest(headers.get(b"x-api-key", b""), self._api_key)
        return by_bearer or by_header


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
