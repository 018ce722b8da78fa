"""Requests with and without offers to upgrade are the same to whoever listens, however their bytes arrive."""

import httptools
import pytest

from proa.server.request_parser import RequestParser

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
SIZED = b"POST /v1 HTTP/1.1\r\nHost: a\r\n%sContent-Length: 11\r\n\r\nhello world"
CHUNKED = b"POST /v1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%s\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
EMPTY = b"POST /v1 HTTP/1.1\r\n%sContent-Length: 0\r\n\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n%s\r\n"


class Listener:
    """Every message as (method, url, headers but those of the offer, body)."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.parser = RequestParser(self)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.body = b"", [], b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.method = self.parser.get_method()
        assert self.parser.get_http_version() == "1.1"
        assert not self.parser.should_upgrade() and self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        offered = {b"connection", b"upgrade", b"http2-settings"}
        headers = [field for field in self.headers if field[0].lower() not in offered]
        self.messages.append((self.method, self.url, headers, self.body))


def parse(data: bytes, cuts: list[int]) -> list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]]:
    listener = Listener()
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        listener.parser.feed_data(data[begin:end])
    return listener.messages


@pytest.mark.parametrize("template", [SIZED, CHUNKED, EMPTY, GET])
def test_an_offer_changes_nothing(template):
    plain = template % b""
    data = template % OFFER + plain + template % OFFER + GET % b""
    expected = parse(plain + plain + plain + GET % b"", [])
    assert len(expected) == 4
    assert parse(data, []) == expected
    for cut in range(1, len(data)):
        assert parse(data, [cut]) == expected
    assert parse(data, list(range(1, len(data)))) == expected


def test_an_unfinished_body_is_no_message():
    listener = Listener()
    listener.parser.feed_data((SIZED % OFFER)[:-1])
    assert listener.messages == [] and listener.body == b"hello worl"
    listener.parser.feed_data(b"d")
    assert [message[3] for message in listener.messages] == [b"hello world"]


@pytest.mark.parametrize(
    "head", [b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"]
)
def test_an_offer_hides_no_contradiction(head):
    listener = Listener()
    with pytest.raises(httptools.HttpParserError):
        listener.parser.feed_data(b"POST / HTTP/1.1\r\n" + OFFER + head + b"\r\nhello")
    assert listener.messages == []
