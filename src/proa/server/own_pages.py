"""Keeps a server without a key from the pages of other sites.

A browser sends requests of any page to any address, this machine's included, and lets a page read the answers of a
name that first meant the page's own server and then 127.0.0.1.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from proa.core.errors import UserError
from proa.server.errors import error_response

__all__ = ["ForeignPageError", "OwnPages"]

# Fetch Metadata: set by browsers, out of reach of pages. Another port of this machine is another site's page too.
_OTHER_SITES = (b"cross-site", b"same-site")


class ForeignPageError(UserError):
    """A request that a page of another site made, or may have made, in its reader's browser."""

    http_status = 403

    def __init__(self, header: str, expected: str, got: str) -> None:
        fix = "give the server an API key (PROA_API_KEY), and send it"
        super().__init__(header, expected, got[:200], fix, code="foreign_page")


class OwnPages:
    """Lets through what programs send, and pages of the server itself.

    open_paths: where links of other sites may lead.
    """

    def __init__(self, app: ASGIApp, *, on_loopback: bool, open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._on_loopback = on_loopback
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        error = None
        if _is_web_page(origin) and origin.partition("://")[2] != host:
            error = ForeignPageError("origin", "a page of this server", origin)
        elif headers.get(b"sec-fetch-site") in _OTHER_SITES and not self._may_lead_to(scope):
            # Images, links and forms come without an origin, and would start an engine.
            error = ForeignPageError("sec-fetch-site", "a page of this server", "a page of another site")
        elif self._on_loopback and not _is_local(host):
            error = ForeignPageError("host", "localhost or an address", host)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope["path"])(scope, receive, send)

    def _may_lead_to(self, scope: Scope) -> bool:
        return scope["path"] in self._open_paths and scope["method"] in ("GET", "HEAD")


def _is_web_page(origin: str) -> bool:
    """Whether a browser sent it; "null" hides a page's address. Windows of programs have schemes of their own."""
    return origin == "null" or origin.startswith(("http://", "https://"))


def _is_local(host: str) -> bool:
    """Whether nobody else decides which machine this is: an address, localhost, or a name without a domain."""
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
