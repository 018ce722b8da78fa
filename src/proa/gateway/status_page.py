"""The page at /: models, load bars, logs. It has no data of its own and asks for the key, so that it needs none."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["PATH", "show"]

PATH = "/"
_PAGE = Path(__file__).with_name("status_page.html").read_bytes()
_SCRIPT = _PAGE.split(b"<script>", 1)[1].split(b"</script>", 1)[0]
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT).digest()).decode()
_HEADERS = {
    # Its own script, its own styles, this gateway, and nothing else; in nobody's frame.
    "content-security-policy": f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def show(_: Request) -> Response:
    """GET /."""
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=_HEADERS)
