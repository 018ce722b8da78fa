"""Passes a request to the engine of its model and the response back, byte for byte.

Held streams are the exception: where a model loads for long, a stream begins before the engine's response does, with
comments that say how far loading is. What follows them is the engine's body, unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from starlette.types import Receive, Scope, Send

from proa.core.errors import ProaError
from proa.gateway.body import read_fields, rewrite
from proa.gateway.config import GatewayConfig
from proa.gateway.headers import is_event_stream, request_headers
from proa.gateway.leases import Engine, Ticket
from proa.gateway.reply import Reply
from proa.gateway.routing import Route, resolve
from proa.gateway.upstream import Exchange, UpstreamError, UpstreamRequest, open_exchange
from proa.server.body_budget import BodyAccount, BodyBudget
from proa.server.errors import BodyTooLargeError, RouteError
from proa.server.sse import ClientGoneError, until_disconnect

__all__ = ["Observer", "Outcome", "Proxy", "ProxyLimits", "Tickets"]

logger = logging.getLogger("proa.gateway")

# Of an engine's error that has to go into a stream.
_MAX_ERROR_BYTES = 64 * 1024


Outcome = Literal["answered", "refused", "broken", "cancelled"]


class Tickets(Protocol):
    """Who lets requests in: the supervisor."""

    @property
    def config(self) -> GatewayConfig:
        """The configuration in use."""
        ...

    def ticket(self, name: str) -> Ticket:
        """A place in the queue of a model. Raises UnknownModelError, QueueFullError and EngineUnavailableError."""
        ...


class Observer(Protocol):
    """Is told what happens to requests. Times in seconds."""

    def request_ended(self, model: str, outcome: Outcome, overhead: float) -> None:
        """`overhead`: time spent here until the engine had the request, waiting for the engine not counted."""
        ...

    def chunk_sent(self, delay: float) -> None:
        """`delay`: from the arrival of a chunk's oldest byte until it was written to the client."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Bounds on what clients and engines may do; bytes and seconds.

    progress_interval: how long a held stream is silent before a comment, the first of which begins the response.
    response_header_timeout: how long an engine may take to begin its response; None: as long as its client waits.
    """

    max_body_bytes: int
    progress_interval: float
    response_header_timeout: float | None


@dataclass(slots=True)
class _Call:
    """A request on its way to the engine of `name`.

    `account`: has its body until the engine begins to answer. `overhead`: seconds it spent in here but for waiting.
    """

    name: str
    target: bytes
    body: bytes
    account: BodyAccount
    is_stream: bool = False
    overhead: float = 0.0


class Proxy:
    """An ASGI application for paths of engines: the `model` of the JSON body says of which.

    With `by_path` it is one for `/upstream/MODEL/PATH`, where the path says it and the body may be anything.
    """

    def __init__(
        self, tickets: Tickets, budget: BodyBudget, limits: ProxyLimits, observer: Observer, *, by_path: bool = False
    ) -> None:
        self._tickets = tickets
        self._budget = budget
        self._limits = limits
        self._observer = observer
        self._by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        try:
            with self._budget.account() as account:
                call = self._read(scope, await self._body(receive, account), account)
                await until_disconnect(receive, self._answer(call, scope, reply))
        except ClientGoneError:
            logger.debug("client gone")

    async def _body(self, receive: Receive, account: BodyAccount) -> bytes:
        chunks: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunks.append(message.get("body", b""))
            account.take(len(chunks[-1]))
            if account.held > self._limits.max_body_bytes:
                raise BodyTooLargeError(self._limits.max_body_bytes)
            more = message.get("more_body", False)
        return b"".join(chunks)

    def _read(self, scope: Scope, body: bytes, account: BodyAccount) -> _Call:
        path: bytes = scope["raw_path"]
        query: bytes = scope["query_string"]
        name, is_stream = "", False
        if self._by_path:
            # A name may have a slash, written as %2F; those around it are slashes.
            _, prefix, *rest = path.split(b"/", 3)
            if len(rest) < 2 or unquote_to_bytes(prefix) != b"upstream":
                raise RouteError(404, scope["method"], scope["path"])
            name, path = unquote_to_bytes(rest[0]).decode(errors="replace"), b"/" + rest[1]
        else:
            fields = read_fields(body)
            name, is_stream = fields.model, fields.is_stream
        return _Call(name, b"%b?%b" % (path, query) if query else path, body, account, is_stream)

    async def _answer(self, call: _Call, scope: Scope, reply: Reply) -> None:
        started = time.perf_counter()
        outcome: Outcome = "cancelled"
        model = ""
        try:
            model = (route := resolve(self._tickets.config, call.name)).model.name
            with self._tickets.ticket(call.name) as ticket:
                if not self._by_path:
                    call.body = _as_routed(call, route)
                call.overhead = time.perf_counter() - started
                engine = await self._engine(call, ticket, reply)
                await self._exchange(call, engine, scope, reply)
            outcome = "answered"
        except ProaError as error:
            outcome = "broken" if isinstance(error, UpstreamError) else "refused"
            # Refusals come as often as clients ask.
            logger.log(logging.INFO if outcome == "broken" else logging.DEBUG, "%s: %s", outcome, error)
            await reply.fail(error)
        finally:
            self._observer.request_ended(model, outcome, call.overhead)

    async def _engine(self, call: _Call, ticket: Ticket, reply: Reply) -> Engine:
        """Wait for the engine. A stream is told meanwhile how far it is."""
        while call.is_stream and not await ticket.wait(self._limits.progress_interval):
            await reply.comment(f"{ticket.route.model.name}: {ticket.progress}")
        return (await ticket.lease()).engine

    async def _exchange(self, call: _Call, engine: Engine, scope: Scope, reply: Reply) -> None:
        started = time.perf_counter()
        url = urlsplit(engine.base_url)
        assert url.hostname is not None and url.port is not None
        headers = request_headers(
            scope["headers"],
            own={"host": url.netloc, "x-request-id": scope["state"]["request_id"], **engine.headers},
        )
        if reply.is_held:
            # The head that would say how the body is encoded cannot follow any more.
            headers = [header for header in headers if header[0] != b"accept-encoding"]
        request = UpstreamRequest(scope["method"].encode(), call.target, headers, call.body)
        exchange = await open_exchange(url.hostname, url.port, request, where=f"model {call.name}")
        try:
            call.overhead += time.perf_counter() - started
            await self._head(exchange, call)
            # An answer may take hours, and many such bodies would be all that may be held.
            del request
            call.body = b""
            call.account.release()
            await self._relay(exchange, reply)
        finally:
            exchange.abort()

    async def _head(self, exchange: Exchange, call: _Call) -> None:
        seconds = self._limits.response_header_timeout
        try:
            async with asyncio.timeout(seconds):
                await exchange.head()
        except TimeoutError as error:
            raise UpstreamError(f"model {call.name}", f"a response within {seconds} s", "none", "retry") from error

    async def _relay(self, exchange: Exchange, reply: Reply) -> None:
        if reply.is_held and not (exchange.status == 200 and is_event_stream(exchange.headers)):
            body = b""
            while len(body) < _MAX_ERROR_BYTES and (data := await exchange.read()):
                body += data
            await reply.refuse(body)
            return
        await reply.start(exchange.status, exchange.headers)
        while data := await exchange.read():
            await reply.write(data)
            self._observer.chunk_sent(time.perf_counter() - exchange.received_at)
        await reply.end()


def _as_routed(call: _Call, route: Route) -> bytes:
    """The body with what is configured for the name, and the name the engine knows."""
    name = {} if call.name == route.upstream_model else {"model": route.upstream_model}
    return rewrite(call.body, {**route.params, **name})
