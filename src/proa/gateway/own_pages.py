"""Keeps a gateway without a key from the pages of other sites.

A browser sends requests of any page to any address, this machine's included, and lets a page read the answers of a
name that first meant the page's own server and then 127.0.0.1.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from proa.core.errors import UserError
from proa.server.errors import error_response

__all__ = ["ForeignPageError", "OwnPages"]


class ForeignPageError(UserError):
    """A request that a page of another site made, or may have made, in its reader's browser."""

    http_status = 403

    def __init__(self, header: str, expected: str, got: str) -> None:
        fix = "give the gateway an API key (PROA_API_KEY), and send it"
        super().__init__(header, expected, got[:200], fix, code="foreign_page")


class OwnPages:
    """Lets through what programs send, and pages of the gateway itself."""

    def __init__(self, app: ASGIApp, *, on_loopback: bool) -> None:
        self._app = app
        self._on_loopback = on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        error = None
        if origin and origin.partition("://")[2] != host:
            error = ForeignPageError("origin", "a page of this gateway", origin)
        elif self._on_loopback and not _is_local(host):
            error = ForeignPageError("host", "localhost or an address", host)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope["path"])(scope, receive, send)


def _is_local(host: str) -> bool:
    """Whether nobody else decides which machine this is: an address, localhost, or a name without a domain."""
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
