"""Which headers belong to a hop and which to the client or the engine (RFC 9110, section 7.6.1)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping

from proa.gateway.upstream import Header

__all__ = ["is_event_stream", "request_headers", "response_headers"]

_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
# The key is the gateway's, the engine gets its own; host, length and expectation are those of this hop.
_REPLACED = frozenset({b"authorization", b"x-api-key", b"host", b"content-length", b"expect", b"x-request-id"})
# W3C Trace Context, level 1: version, trace id, parent id, flags; ids of zeros are none.
_TRACE_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def request_headers(given: Iterable[Header], *, own: Mapping[str, str]) -> list[Header]:
    """What goes to the engine for a request that came with `given` (names in lower case).

    `own` are the headers of the hop to the engine, its key among them; the client's of these names are left out. Trace
    context is passed on, or made.
    """
    ours = [(name.lower().encode(), value.encode()) for name, value in own.items()]
    dropped = _REPLACED.union(name for name, _ in ours)
    headers = [header for header in _end_to_end(given) if header[0] not in dropped]
    traces = [value for name, value in headers if name == b"traceparent"]
    if len(traces) != 1 or not _TRACE_PARENT.fullmatch(traces[0]):
        # Not a trace context: neither is the state that belongs to it.
        headers = [header for header in headers if header[0] not in (b"traceparent", b"tracestate")]
        # The last two digits say that nobody records this trace yet.
        ours.append((b"traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00".encode()))
    return ours + headers


def response_headers(given: Iterable[Header]) -> list[Header]:
    """What goes to the client for a response that came with `given`. The body goes along unchanged."""
    given = list(given)
    is_chunked = any(name == b"transfer-encoding" for name, _ in given)
    headers = [
        (name, value)
        for name, value in _end_to_end(given)
        # With both, the encoding counts; the length is that of nothing. The gate writes the request id.
        if not (name == b"content-length" and is_chunked) and name != b"x-request-id"
    ]
    names = {name for name, _ in headers}
    if is_event_stream(headers) and b"x-accel-buffering" not in names:
        # nginx and its like would hold a stream back.
        headers.append((b"x-accel-buffering", b"no"))
    return headers


def is_event_stream(headers: Iterable[Header]) -> bool:
    """Whether the body is server-sent events."""
    return any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers)


def _end_to_end(headers: Iterable[Header]) -> list[Header]:
    headers = list(headers)
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]
