"""A scripted OpenAI endpoint: enough of the protocol for the client commands, without a server of ours."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class FakeEndpoint:
    """What it was asked, and what it answers next. `answers` are lists of deltas; each token is one event."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    deltas: list[dict[str, str]] = field(default_factory=lambda: [{"content": "Pa"}, {"content": "ris"}])
    fail_with: tuple[int, dict[str, Any]] | None = None
    fails: str = ""  # part of the paths that do
    error_event: str = ""
    drop_tokens: int = 0
    vocab_size: int | None = None
    max_model_len: int | None = None
    paths: list[str] = field(default_factory=list)
    logical_count: list[list[float]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *args: Any) -> None:
        """Silence."""

    def _json(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        fake: FakeEndpoint = self.server.fake
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "fake-model"}]})
        elif self.path == "/v1/models/fake-model" and fake.max_model_len:
            self._json(200, {"id": "fake-model", "max_model_len": fake.max_model_len})
        elif self.path == "/get_server_info" and fake.vocab_size:
            self._json(200, {"vocab_size": fake.vocab_size})
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client may leave in the middle
            self._answer()

    def _answer(self) -> None:
        fake: FakeEndpoint = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append(body)
        fake.headers.append(dict(self.headers))
        fake.paths.append(self.path)
        if fake.fail_with and fake.fails in self.path:
            self._json(*fake.fail_with)
            return
        if self.path.endswith("_expert_distribution_record"):
            self._json(200, {"logical_count": fake.logical_count})
            return
        if "stream" not in body:
            self._json(200, {"choices": []})
            return
        chat = self.path == "/v1/chat/completions"
        if chat:
            choices: list[dict[str, Any]] = [{"delta": delta} for delta in fake.deltas]
        else:
            choices = [{"text": "x"} for _ in range(body["max_tokens"] - fake.drop_tokens)]
        events: list[Any] = [{"choices": [{"index": 0, "finish_reason": None, **choice}]} for choice in choices]
        events[-1]["choices"][0]["finish_reason"] = "stop"
        if fake.error_event:
            events = [events[0], {"error": {"message": fake.error_event}}]
        usage = {"completion_tokens": len(choices), "prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
        events.append({"choices": [], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(f": comment\n\ndata: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


@pytest.fixture
def fake_endpoint() -> Iterator[FakeEndpoint]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    fake = FakeEndpoint(url=f"http://127.0.0.1:{server.server_address[1]}")
    server.fake = fake  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands see no settings of the person who runs the tests."""
    for name in ("PROA_API_KEY", "PROA_BASE_URL", "PROA_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
