"""The HTTP client with answers that engines give, or should not give."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import pytest

from proa.gateway.upstream import UpstreamError, UpstreamRequest, open_exchange

HEAD = b"HTTP/1.1 200 OK\r\n"
CASES = {
    "length": (HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "chunked": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nTrailer: x\r\n\r\n",
                b"hello"),
    "until the end": (HEAD + b"Connection: close\r\n\r\nhello", b"hello"),
    "empty": (HEAD + b"Content-Length: 0\r\n\r\n", b""),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + HEAD
                + b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "more than said": (HEAD + b"Content-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\n", b"hello"),
}  # fmt: skip
BROKEN = {
    "too short": HEAD + b"Content-Length: 50\r\n\r\nhello",
    "no last chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "not a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nhello\r\n",
    "not HTTP": b"* OK IMAP4rev1 ready\r\n",
    "nothing": b"",
    "only part of a head": HEAD + b"Content-Le",
    "no status there is": b"HTTP/1.1 600 Odd\r\nContent-Length: 5\r\n\r\nhello",
    "endless headers": HEAD + b"X: " + b"x" * 300_000,
}


@asynccontextmanager
async def serve(answer):
    """A server that awaits `answer(reader, writer)` after the head of a request; its port."""
    tasks = []

    async def connection(reader, writer):
        tasks.append(asyncio.current_task())
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(connection, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        server.close()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def engine(*pieces, hold=False):
    """A server that writes `pieces` whatever it is sent; its port, and an event for when its client is gone."""
    gone = asyncio.Event()

    async def answer(reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if hold:
            with suppress(ConnectionError):
                await reader.read()
            gone.set()

    async with serve(answer) as port:
        yield port, gone


async def exchange_with(port, method=b"POST"):
    return await open_exchange("127.0.0.1", port, UpstreamRequest(method, b"/x", [(b"host", b"e")], b"{}"), where="m")


async def read_all(exchange):
    try:
        await exchange.head()
        pieces = []
        while data := await exchange.read():
            pieces.append(data)
        return b"".join(pieces)
    finally:
        exchange.abort()


@pytest.mark.parametrize("answer, body", CASES.values(), ids=CASES)
@pytest.mark.parametrize("cut", [1, 7, 10_000])
async def test_a_body_is_what_was_sent_however_it_arrives(answer, body, cut):
    pieces = [answer[at : at + cut] for at in range(0, len(answer), cut)]
    async with engine(*pieces) as (port, _):
        assert await read_all(await exchange_with(port)) == body


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_breaks_off_is_an_error_and_no_end(answer):
    async with engine(answer) as (port, _):
        exchange = await exchange_with(port)
        with pytest.raises(UpstreamError, match=r"\[m\]"):
            await read_all(exchange)


async def test_a_head_request_has_no_body():
    async with engine(HEAD + b"Content-Length: 5\r\n\r\n", hold=True) as (port, _):
        assert await read_all(await exchange_with(port, b"HEAD")) == b""


async def test_nobody_there_is_an_error():
    async with engine() as (port, _):
        pass
    with pytest.raises(UpstreamError, match="takes connections"):
        await exchange_with(port)


async def test_aborting_is_seen_by_the_engine_at_once():
    async with engine(HEAD + b"Content-Length: 50\r\n\r\nhello", hold=True) as (port, gone):
        exchange = await exchange_with(port)
        await exchange.head()
        assert await exchange.read() == b"hello"
        start = time.monotonic()
        exchange.abort()
        await asyncio.wait_for(gone.wait(), 5)
        assert time.monotonic() - start < 1.0
        with pytest.raises(UpstreamError):
            await exchange.read()


async def test_what_a_client_does_not_take_is_not_read_from_the_engine():
    sent = 0

    async def answer(reader, writer):
        nonlocal sent
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async with serve(answer) as port:
        exchange = await exchange_with(port)
        await exchange.head()
        await asyncio.sleep(0.3)
        assert sent < 32, "kernel buffers hold some MiB, the rest waits for us"
        assert len(await read_all(exchange)) == 64 << 20


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"X-First: 1\r\nContent-Length: 1\r\n\r\n" + b"aHTTP/1.1 200 OK\r\nX-Second: 2\r\n",
        HEAD + b"X-First: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Trailer: 3\r\n\r\n",
    ],
    ids=["another message", "trailers"],
)
async def test_headers_are_those_of_the_head(answer):
    """All of it comes at once, before anybody has read the head."""
    async with engine(answer) as (port, _):
        request = UpstreamRequest(b"POST", b"/x", [], b"")
        exchange = await open_exchange("127.0.0.1", port, request, where="model m")
        await exchange.head()
        assert await exchange.read() == b"a"
        names = [name for name, _ in exchange.headers]
        exchange.abort()
    assert names[0] == b"x-first" and len(names) == 2
