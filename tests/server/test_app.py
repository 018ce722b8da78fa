"""The application without a process around it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import tiny_tokenizer

from proa.core.errors import CheckpointError, QueueFullError, UnavailableError, UserError
from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import Generate, Ready, StepOutput, TokenOutput
from proa.server import frontend as frontend_module
from proa.server.app import create_app
from proa.server.body_budget import BodyBudget
from proa.server.config import ServerConfig
from proa.server.engine_client import EngineClient
from proa.server.frontend import Frontend
from proa.server.metrics import Metrics
from proa.server.protocol import ChatCompletionRequest
from proa.server.services import Services
from proa.server.sse import EventStream

CHAT = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})


def services(model: Path) -> Services:
    config = ServerConfig(model_path=model)
    client = EngineClient(lambda message: None, max_queued=1)
    return Services(config, client, Frontend(model, None), Metrics("tiny"))


async def test_unexpected_errors_tell_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    parts = services(model_dir)

    def fail() -> bytes:
        raise RuntimeError("secret at /home/someone 0x7f00")

    monkeypatch.setattr(parts.metrics, "render", fail)
    transport = httpx.ASGITransport(create_app(parts, on_loopback=True), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/metrics", headers={"x-request-id": "abc"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "abc"
    assert response.json()["error"]["type"] == "server_error" and "secret" not in response.text
    assert "secret" in caplog.text


async def test_pages_of_other_sites_cannot_use_a_server_without_a_key(model_dir: Path):
    async def status(api_key: str | None, **headers: str) -> int:
        parts = services(model_dir)
        parts.config = dataclasses.replace(parts.config, api_key=api_key)
        transport = httpx.ASGITransport(create_app(parts, on_loopback=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return (await client.get("/v1/models", headers=headers)).status_code

    own = ({}, {"origin": "http://127.0.0.1:8000"}, {"origin": "app://chat"}, {"host": "localhost:8000"})
    foreign = ({"origin": "https://evil.example"}, {"origin": "http://127.0.0.1:3000"}, {"origin": "null"},
               {"sec-fetch-site": "cross-site"}, {"host": "evil.example:8000"})  # fmt: skip
    assert [await status(None, **headers) for headers in own] == [200] * 4
    assert [await status(None, **headers) for headers in foreign] == [403] * 5
    assert [await status("k", authorization="Bearer k", **headers) for headers in foreign] == [200] * 5
    assert await status("k", origin="https://evil.example") == 401


class TestFrontend:
    async def test_before_it_is_loaded(self, model_dir: Path):
        frontend = Frontend(model_dir, None)
        with pytest.raises(UnavailableError):
            await frontend.encode_text("a", max_tokens=5)
        await frontend.load()
        assert await frontend.encode_text("a", max_tokens=5)
        assert frontend.eos_token_ids == {2}
        frontend.close()

    async def test_without_template(self, tmp_path: Path):
        frontend = Frontend(tiny_tokenizer.write_model(tmp_path / "base", template=None), None)
        await frontend.load()
        with pytest.raises(UserError, match="chat template"):
            await frontend.encode_chat(CHAT.turn(), max_tokens=100)
        frontend.close()

    async def test_template_file_of_the_user(self, model_dir: Path, tmp_path: Path):
        (tmp_path / "mine.jinja").write_text("mine {{ messages[0].content }}")
        frontend = Frontend(model_dir, tmp_path / "mine.jinja")
        await frontend.load()
        assert (
            frontend.tokenizer.decode((await frontend.encode_chat(CHAT.turn(), max_tokens=100)).token_ids) == "mine hi"
        )
        frontend.close()

    async def test_hopeless_prompts_are_not_tokenized(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch):
        frontend = Frontend(model_dir, None)
        await frontend.load()
        monkeypatch.setattr(type(frontend.tokenizer), "encode", lambda *_, **__: pytest.fail("tokenized"))
        with pytest.raises(UserError, match="at most 10 tokens"):
            await frontend.encode_text("x" * 10_000, max_tokens=10)
        frontend.close()

    async def test_queue_is_bounded(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(frontend_module, "_MAX_PENDING", 2)
        frontend = Frontend(model_dir, None)
        await frontend.load()
        results = await asyncio.gather(
            *(frontend.encode_text("hello", max_tokens=99) for _ in range(5)), return_exceptions=True
        )
        assert sum(isinstance(result, QueueFullError) for result in results) == 3
        frontend.close()

    async def test_damaged_files(self, tmp_path: Path):
        model = tiny_tokenizer.write_model(tmp_path / "model")
        (model / "generation_config.json").write_text("[1]")
        with pytest.raises(CheckpointError, match="generation_config"):
            await Frontend(model, None).load()


class TestClient:
    READY = Ready(
        max_model_len=10, kv_tokens_total=10, max_running_requests=1, vocab_size=9, load_seconds=0.0, weight_bytes=0
    )

    async def test_nothing_is_kept_of_ended_sequences(self):
        sent = []
        client = EngineClient(sent.append, max_queued=9)
        client.handle(self.READY)
        requests = [Generate(rid=str(index), token_ids=[1], sampling=SamplingParams()) for index in range(3)]
        stream = client.submit(requests)
        done = TokenOutput(rid="0", token_ids=[1], finish_reason="stop")
        client.handle(StepOutput([done, done, TokenOutput(rid="unknown", token_ids=[1])], client.stats))
        assert [output.rid for output in await stream.next()] == ["0"]
        stream.abort("1")
        client.handle(StepOutput([TokenOutput(rid="1", token_ids=[5])], client.stats))
        assert client.num_in_flight == 1
        stream.close()
        stream.close()
        assert client.num_in_flight == 0 and [type(message).__name__ for message in sent].count("Abort") == 2
        await asyncio.wait_for(client.idle(), 1)

    async def test_engine_down_ends_everything(self):
        client = EngineClient(lambda message: None, max_queued=9)
        client.handle(self.READY)
        stream = client.submit([Generate(rid="a", token_ids=[1], sampling=SamplingParams())])
        flush = asyncio.create_task(client.flush_cache())
        await asyncio.sleep(0)
        client.engine_down("it is gone")
        (output,) = await stream.next()
        assert (output.finish_reason, output.error) == ("error", "it is gone")
        assert await flush is False
        with pytest.raises(UnavailableError):
            client.submit([])


async def test_stream_of_a_client_that_left_before_it_began():
    """The generator behind is never entered, so nothing but `close` can end the generation."""
    ended = []

    class Source:
        async def frames(self) -> AsyncIterator[bytes]:
            yield b""

        def close(self) -> None:
            ended.append(1)

    async def receive() -> dict:
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        await asyncio.sleep(3600)

    stream = EventStream(Source(), keepalive=10, write_timeout=10)
    await asyncio.wait_for(stream({"type": "http"}, receive, send), 5)
    assert ended == [1]


def test_body_budget():
    budget = BodyBudget(10)
    budget.take(10)
    with pytest.raises(UnavailableError):
        budget.take(1)
    budget.give_back(11)
    budget.take(10)
