"""Hostile bytes on the port: large headers and bodies, slow connections. RSS stays bounded, others are undisturbed."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from pathlib import Path

import pytest
from server_process import KEY, ServerProcess

MIB = 1024 * 1024
AUTH = f"authorization: Bearer {KEY}\r\n".encode()


def connect(server: ServerProcess) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.settimeout(10)
    return connection


def send_until_refused(connection: socket.socket, data: bytes, times: int) -> int:
    """Bytes the server took before it hung up."""
    sent = 0
    for _ in range(times):
        try:
            sent += connection.send(data)
        except (BrokenPipeError, ConnectionResetError):
            break
    return sent


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            data = connection.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return received
        if not data:
            return received
        received += data


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1]) if response.startswith(b"HTTP/1.1 ") else 0


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path):
    limits = {
        "max_body_bytes": 32 * MIB, "max_total_body_bytes": 64 * MIB, "max_connections": 16, "body_idle_timeout": 3.0,
    }  # fmt: skip
    process = ServerProcess(tmp_path_factory.mktemp("small"), model_dir, server=limits)
    yield process.wait_ready()
    process.stop()


class TestHeaders:
    def test_one_huge_field(self, server: ServerProcess):
        before = server.rss_bytes()
        with connect(server) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-huge: ")
            assert send_until_refused(connection, b"a" * MIB, 64) < 64 * MIB or status_of(read_all(connection)) == 431
        with connect(server) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-huge: " + b"a" * 100_000)
            response = read_all(connection)
        assert status_of(response) == 431 and b'"error"' in response
        assert server.rss_bytes() - before < 16 * MIB

    def test_one_huge_name_or_line(self, server: ServerProcess):
        for start in (b"GET /livez HTTP/1.1\r\n", b"GET /", b""):
            with connect(server) as connection:
                connection.sendall(start + b"a" * 200_000)
                assert status_of(read_all(connection)) in (400, 431)

    @pytest.mark.parametrize("count", [150, 10_000])
    def test_many_fields(self, server: ServerProcess, count: int):
        fields = b"".join(b"x-%d: 1\r\n" % index for index in range(count))
        with connect(server) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n")
            assert status_of(read_all(connection)) == 431

    def test_limit_is_above_what_clients_send(self, server: ServerProcess):
        with server.client() as client:
            headers = {f"x-{index}": "v" * 400 for index in range(100)}
            assert client.get("/livez", headers=headers).status_code == 200
            assert client.get("/livez", headers={"x-big": "v" * 60_000}).status_code == 200

    def test_garbage(self, server: ServerProcess):
        for data in (
            b"\x00\xff" * 100,
            b"\x80\x04\x95cos\nsystem\n(S'id'\ntR.",
            b"GET\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\n",
        ):
            with connect(server) as connection:
                connection.sendall(data + b"\r\n\r\n")
                assert status_of(read_all(connection)) in (0, 400)


class TestBodies:
    def test_announced(self, server: ServerProcess):
        with connect(server) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + AUTH + b"content-length: 1073741824\r\n\r\n"
            )
            assert status_of(connection.recv(65536)) == 413

    def test_chunked(self, server: ServerProcess):
        before = server.rss_bytes()
        with connect(server) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + AUTH + b"transfer-encoding: chunked\r\n\r\n"
            )
            send_until_refused(connection, b"100000\r\n" + b" " * MIB + b"\r\n", 40)
            assert status_of(connection.recv(65536)) == 413
        assert server.rss_bytes() - before < 160 * MIB

    def test_client_library_sees_the_413(self, server: ServerProcess):
        with server.client() as client:
            response = client.post("/v1/completions", content=b" " * (40 * MIB))
            assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"

    def test_without_key_nothing_is_kept(self, server: ServerProcess):
        before = server.rss_bytes()
        with connect(server) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 33554432\r\n\r\n")
            send_until_refused(connection, b" " * MIB, 31)
            assert status_of(connection.recv(65536)) == 401
        assert server.rss_bytes() - before < 8 * MIB

    def test_all_together(self, small_server: ServerProcess):
        """Bodies of 30 MiB are refused beyond the common budget of 64 MiB, not kept."""
        server = small_server
        before = server.rss_bytes()
        connections = [connect(server) for _ in range(12)]
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + AUTH + b"content-length: 31457280\r\n\r\n"
            for connection in connections:
                connection.sendall(head)
                send_until_refused(connection, b" " * MIB, 29)
            assert server.rss_bytes() - before < 200 * MIB
            statuses = [status_of(read_all(connection)) for connection in connections]
            assert set(statuses) <= {408, 503} and statuses.count(503) >= 9
        finally:
            for connection in connections:
                connection.close()
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


class TestSlowConnections:
    def test_two_hundred(self, server: ServerProcess):
        """200 connections that send a byte now and then are cut off; a stream and new requests go on meanwhile."""
        before = server.rss_bytes()
        connections = [connect(server) for _ in range(200)]
        for index, connection in enumerate(connections):
            if index % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
            else:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + AUTH + b"content-length: 1000\r\n\r\n" + b"{"
                )
        started = time.monotonic()
        try:
            with (
                server.client() as client,
                client.stream(
                    "POST", "/v1/completions", json={"prompt": "hi there", "max_tokens": 500, "stream": True}
                ) as stream,
            ):
                lines = 0
                for line in stream.iter_lines():
                    lines += line.startswith("data: ")
                    if lines % 100 == 0 and lines:
                        for connection in connections[1::2]:
                            send_until_refused(connection, b"a", 1)
                assert lines == 501
            with server.client() as client:
                assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
            assert server.rss_bytes() - before < 32 * MIB
            statuses = {status_of(read_all(connection)) for connection in connections}
            assert statuses == {408}
            assert time.monotonic() - started < 8.0
        finally:
            for connection in connections:
                connection.close()

    def test_silent_connections_are_closed(self, server: ServerProcess):
        with connect(server) as connection:
            started = time.monotonic()
            assert read_all(connection) == b"" and time.monotonic() - started < 5.0

    def test_blank_lines_are_no_request(self, server: ServerProcess):
        with connect(server) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status_of(connection.recv(65536)) == 200
            started = time.monotonic()
            while time.monotonic() - started < 6.0 and send_until_refused(connection, b"\r\n", 1):
                time.sleep(0.1)
            assert time.monotonic() - started < 5.0

    def test_connection_limit(self, small_server: ServerProcess):
        server = small_server
        server.wait(lambda: server.status("/livez") == 200)
        held = [connect(server) for _ in range(16)]
        try:
            with connect(server) as connection:
                connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
                assert status_of(read_all(connection)) == 503
        finally:
            for connection in held:
                connection.close()
        server.wait(lambda: server.status("/livez") == 200)


def test_an_offer_to_upgrade_costs_no_body(server: ServerProcess):
    """As Java's HttpClient sends every request to a server it does not know yet."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
    bodies = []
    with contextlib.closing(connection):
        for extra in ({}, offer, {}):
            connection.request("POST", "/tokenize", body=b'{"prompt": "hello"}', headers={**headers, **extra})
            response = connection.getresponse()
            bodies.append((response.status, response.read()))
    assert bodies[0][0] == 200 and bodies == [bodies[0]] * 3


def test_keep_alive(server: ServerProcess):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.connect()
        first = connection.sock
        for method, status in (("GET", 404), ("HEAD", 404), ("POST", 404)):
            connection.request(method, "/nothing", headers={"x-api-key": KEY})
            response = connection.getresponse()
            response.read()
            assert response.status == status and connection.sock is first
