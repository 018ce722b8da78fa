"""How a response ends when its engine does not: with an error where one can be read, else visibly broken."""

from __future__ import annotations

import json

import pytest

from proa.gateway.reply import Reply
from proa.gateway.upstream import UpstreamError

ERROR = UpstreamError("model m", "a complete response", "a connection that ended")
STREAM = [(b"content-type", b"text/event-stream")]


class Client:
    """What a client is sent."""

    def __init__(self, path="/v1/chat/completions"):
        self.status = None
        self.headers = {}
        self.body = b""
        self.is_complete = False
        self.reply = Reply({"type": "http", "path": path}, self.send)

    async def send(self, message):
        if message["type"] == "http.response.start":
            assert self.status is None, "one head"
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            assert self.status is not None and not self.is_complete
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)


@pytest.mark.parametrize("path, kind", [("/v1/chat/completions", "service_unavailable"), ("/v1/messages", "error")])
async def test_an_error_before_the_head_is_a_response(path, kind):
    client = Client(path)
    await client.reply.fail(ERROR)
    body = json.loads(client.body)
    assert client.status == 503 and client.is_complete and client.headers[b"retry-after"] == b"5"
    assert kind in (body.get("type"), body["error"]["type"])


@pytest.mark.parametrize(
    "pieces", [[], [b"data: {}\n\n"], [b"data: {}", b"\n", b"\n"], [b"d\n\n", b"data: {}\n", b"\n"]]
)
async def test_an_error_between_events_is_an_event(pieces):
    client = Client()
    await client.reply.start(200, STREAM)
    for piece in pieces:
        await client.reply.write(piece)
    await client.reply.fail(ERROR)
    event = client.body.removeprefix(b"".join(pieces))
    assert json.loads(event.removeprefix(b"data: ").removesuffix(b"\n\n"))["error"]["code"] == "unavailable"
    assert client.is_complete


@pytest.mark.parametrize("path, name", [("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")])
async def test_events_have_names_where_their_api_names_them(path, name):
    client = Client(path)
    await client.reply.start(200, STREAM)
    await client.reply.fail(ERROR)
    assert client.body.startswith(name + b"data: ")


@pytest.mark.parametrize(
    "headers, sent",
    [
        (STREAM, b'data: {"half'),
        (STREAM, b"data: {}\n"),
        ([(b"content-type", b"application/json"), (b"content-length", b"90")], b'{"a": "\n\n'),
        ([*STREAM, (b"content-encoding", b"gzip")], b"\x1f\x8b\n\n"),
    ],
)
async def test_where_an_error_would_be_read_as_something_else_the_response_stays_incomplete(headers, sent):
    client = Client()
    await client.reply.start(200, headers)
    await client.reply.write(sent)
    await client.reply.fail(ERROR)
    assert client.body == sent and not client.is_complete


async def test_a_response_without_a_body_has_no_length():
    client = Client()
    await client.reply.start(304, [(b"etag", b"x"), (b"content-length", b"90")])
    await client.reply.end()
    assert client.headers == {b"etag": b"x"} and client.is_complete


async def test_a_held_stream_gets_an_engines_refusal_as_an_event():
    for body, shown in (
        (b'{"error": {"message": "too long"},\n "x": 1.0}', {"error": {"message": "too long"}, "x": 1.0}),
        (b"Bad Gateway\xff", {"error": {"message": "Bad Gateway\ufffd", "type": "upstream_error"}}),
    ):
        client = Client()
        await client.reply.comment("m: loading")
        await client.reply.start(400, [(b"content-type", b"application/json")])
        await client.reply.refuse(body)
        comment, event, end = client.body.split(b"\n\n")
        assert (client.status, comment, end) == (200, b": m: loading", b"")
        assert json.loads(event.removeprefix(b"data: ")) == shown and client.is_complete
