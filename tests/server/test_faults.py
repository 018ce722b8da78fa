"""Clients that leave, engines that die, signals, full queues."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fake_engine import FAILING_SEED, SLOW_SEED
from server_process import ServerProcess, is_alive

MIB = 1024 * 1024
LONG = {"prompt": "hello world", "max_tokens": 4000}
# About eight seconds of tokens at the fake engine's usual pace: everything below must interrupt it.
STREAM = {**LONG, "stream": True}


@contextmanager
def streaming(server: ServerProcess, body: dict = STREAM) -> Iterator[Iterator[str]]:
    """Lines of a stream that has begun."""
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = data_lines(response)
        next(lines)
        yield lines


def data_lines(response: httpx.Response) -> Iterator[str]:
    deadline = time.monotonic() + 30  # comments keep a stream alive for ever
    for line in response.iter_lines():
        assert time.monotonic() < deadline, "the stream does not end"
        if line.startswith("data: "):
            yield line


def events(lines: Iterator[str]) -> list[dict | str]:
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


class TestDisconnect:
    @pytest.mark.parametrize("stream", [True, False])
    def test_frees_the_slot(self, server: ServerProcess, stream: bool):
        before = len(server.journal("generate"))
        client = server.client()
        if stream:
            with client.stream("POST", "/v1/completions", json=STREAM) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=0.5)
        left = time.time()
        client.close()
        rid = server.wait(lambda: server.journal("generate")[before:])[0]["rid"]
        abort = server.wait(lambda: [entry for entry in server.journal("abort") if entry["rid"] == rid], 2.0)[0]
        assert abort["time"] - left < 1.0 and abort["known"]

    def test_of_every_choice(self, server: ServerProcess):
        before = len(server.journal("generate"))
        with streaming(server, {**STREAM, "n": 4}):
            server.wait(lambda: len(server.journal("generate")) == before + 4)
        rids = {entry["rid"] for entry in server.journal("generate")[before:]}
        server.wait(lambda: rids <= {entry["rid"] for entry in server.journal("abort")}, 1.0)

    def test_of_a_client_that_does_not_read(self, start_server):
        server = start_server(server={"write_timeout": 0.5}, engine={"step_seconds": 0.0, "max_model_len": 2_000_000})
        body = {"prompt": "hello world", "max_tokens": 1_000_000, "stream": True, "logprobs": 20}
        before = server.rss_bytes()
        with streaming(server, body):
            server.wait(lambda: server.journal("abort"), 15.0, "abort of the stalled stream")
        assert server.rss_bytes() - before < 150 * 1024 * 1024


class TestEngineDeath:
    def test_kill(self, start_server):
        server = start_server(server={"restart_backoff": 0.4})
        first = server.engine_pid()
        answers = []

        def ask() -> None:
            with server.client() as client:
                answers.append(client.post("/v1/completions", json=LONG))

        thread = threading.Thread(target=ask)
        thread.start()
        server.wait(lambda: server.journal("generate"))
        with streaming(server) as lines:
            killed = time.monotonic()
            os.kill(first, signal.SIGKILL)
            rest = events(lines)
            assert time.monotonic() - killed < 2.0
        assert rest[-1] == "[DONE]" and set(rest[-2]) == {"error"}
        assert rest[-2]["error"]["type"] == "service_unavailable" and "SIGKILL" in rest[-2]["error"]["message"]
        thread.join(5)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["type"] == "service_unavailable"
        # The API stays up and says that it is not ready, then the engine is back.
        assert server.status("/livez") == 200 and server.status("/readyz") == 503
        with server.client() as client:
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        server.wait_ready()
        assert server.engine_pid() != first
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200
            assert 'proa:engine_restarts_total{model_name="tiny"} 1.0' in client.get("/metrics").text
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait(lambda: len(server.journal("started")) == 3)
        lines = [line for line in server.log().splitlines() if "starting it again" in line]
        assert [float(line.rsplit(" in ", 1)[1].split()[0]) for line in lines] == [0.4, 0.8]

    def test_hang(self, start_server):
        server = start_server(server={"watchdog_timeout": 1.0, "restart_backoff": 0.2})
        first = server.engine_pid()
        with streaming(server) as lines:
            os.kill(first, signal.SIGSTOP)
            rest = events(lines)
        assert "no sign of life for 1 s" in rest[-2]["error"]["message"] and rest[-1] == "[DONE]"
        assert re.search(rf"engine process {first} hangs; its threads: python\S* T \d", server.log())
        server.wait(lambda: len(server.journal("started")) == 2)
        server.wait_ready()
        assert not is_alive(first) and server.engine_pid() != first

    def test_pause_of_the_server_is_no_hang_of_the_engine(self, start_server):
        server = start_server(server={"watchdog_timeout": 1.0})
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert server.status() == 200 and len(server.journal("started")) == 1

    def test_user_error_ends_the_server(self, start_server):
        server = start_server(ready=False, engine={"start_fault": "user"})
        assert server.exit_code() == 3
        assert "[config] expected a good model, got a bad one." in server.log()
        assert len(server.journal("started")) == 1

    def test_engine_that_never_starts(self, start_server):
        server = start_server(
            ready=False, server={"restart_backoff": 0.05, "max_start_attempts": 2}, engine={"start_fault": "crash"}
        )
        assert server.exit_code() == 1
        assert "SIGKILL" in server.log() and len(server.journal("started")) == 2

    def test_failed_request(self, server: ServerProcess):
        body = {**LONG, "seed": FAILING_SEED}
        with server.client() as client:
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 503 and "injected failure" in response.json()["error"]["message"]
        with streaming(server, {**body, "stream": True}) as lines:
            rest = events(lines)
        assert set(rest[-2]) == {"error"} and rest[-1] == "[DONE]"

    def test_bad_tokenizer_ends_the_server(self, start_server, model_dir: Path, tmp_path: Path):
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "tokenizer.json").write_text("{")
        server = start_server(ready=False, model=tmp_path / "broken")
        assert server.exit_code() == 3 and "[tokenizer]" in server.log()


class TestStart:
    def test_loading(self, start_server):
        server = start_server(ready=False, engine={"load_seconds": 1.5})
        server.wait(lambda: server.status("/livez") == 200)
        with server.client() as client:
            body = server.wait(lambda: (found := client.get("/readyz").json()).get("load") and found)
            assert body["engine"] == "loading" and body["load"]["bytes_total"] == 1000
            assert client.get("/readyz").status_code == 503
            assert client.post("/v1/completions", json=LONG).status_code == 503
            assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        server.wait_ready()

    def test_port_in_use(self, server: ServerProcess, start_server):
        other = start_server(ready=False, server={"port": server.port})
        assert other.exit_code() != 0 and "expected an address that is free" in other.log()


class TestSignals:
    def test_drain(self, start_server):
        server = start_server()
        engine = server.engine_pid()
        with server.client() as other:
            other.get("/livez")
            with streaming(server, {**STREAM, "max_tokens": 300}) as lines:
                server.process.send_signal(signal.SIGTERM)
                server.wait(lambda: server.status("/readyz") == 503, 1.0)
                assert other.post("/v1/completions", json=LONG).status_code == 503
                rest = events(lines)
        assert rest[-1] == "[DONE]" and rest[-2]["choices"][0]["finish_reason"] == "length"
        assert len(rest) == 300  # 299 more chunks and [DONE]
        assert server.exit_code(5) == 0 and not is_alive(engine)

    def test_drain_limit(self, start_server):
        server = start_server(server={"drain_timeout": 0.5})
        with streaming(server) as lines:
            server.process.send_signal(signal.SIGINT)
            rest = events(lines)
        assert "shutting down" in rest[-2]["error"]["message"] and rest[-1] == "[DONE]"
        assert server.exit_code(3) == 0

    def test_second_signal(self, start_server):
        server = start_server()
        engine = server.engine_pid()
        with streaming(server) as lines:
            server.process.send_signal(signal.SIGTERM)
            server.wait(lambda: server.status("/readyz") == 503, 1.0)
            server.process.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            assert server.exit_code(2) == 0
            assert time.monotonic() - sent < 1.0
            with pytest.raises(httpx.TransportError):
                list(lines)
        server.wait(lambda: not is_alive(engine), 1.0)

    def test_no_orphan(self, start_server):
        server = start_server()
        engine = server.engine_pid()
        # Connected sockets need no names: a killed server leaves none.
        assert not socket_directories(server)
        with streaming(server):
            server.process.kill()
            server.wait(lambda: not is_alive(engine), 2.0, "end of the engine")
        server.process.wait()
        assert not socket_directories(server)

    def test_sockets_of_a_server_killed_while_it_starts_its_engine(self, start_server):
        """Until the engine's first message they have names, in a private directory; the next server removes it."""
        server = start_server(ready=False, engine={"start_fault": "silence"})
        directories = server.wait(lambda: socket_directories(server))
        assert len(directories) == 1 and directories[0].stat().st_mode & 0o777 == 0o700
        server.process.kill()
        server.process.wait()
        second = start_server()
        assert not directories[0].exists()
        second.stop()
        assert not socket_directories(second)


def socket_directories(server: ServerProcess) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"proa-{server.process.pid}-*"))


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    """Runs one sequence, lets one wait."""
    settings = {"server": {"max_queued_requests": 1}, "engine": {"max_running_requests": 1}}
    process = ServerProcess(tmp_path_factory.mktemp("narrow"), model_dir, **settings)
    yield process.wait_ready()
    process.stop()


class TestQueue:
    def test_waiting_client_leaves(self, narrow_server: ServerProcess):
        server = narrow_server
        before = len(server.journal("generate"))
        with streaming(server):
            with pytest.raises(httpx.ReadTimeout), server.client() as client:
                client.post("/v1/completions", json=LONG, timeout=0.3)
            waiting = server.journal("generate")[before + 1]["rid"]
            server.wait(lambda: any(entry["rid"] == waiting for entry in server.journal("abort")), 1.0)

    def test_full(self, narrow_server: ServerProcess):
        server = narrow_server
        before = len(server.journal("generate"))
        with streaming(server), server.client() as client:
            waiting = threading.Thread(target=lambda: client.post("/v1/completions", json=LONG))
            waiting.start()
            server.wait(lambda: len(server.journal("generate")) == before + 2)
            with server.client() as third:
                for stream in (False, True):
                    response = third.post("/v1/completions", json={**LONG, "stream": stream})
                    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
                    assert response.json()["error"]["code"] == "queue_full"
                too_many = third.post("/v1/completions", json={**LONG, "n": 3})
                assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
                assert 'proa:num_rejected_requests_total{model_name="tiny"} 2.0' in third.get("/metrics").text
                third.post("/abort_request", json={"abort_all": True})
            waiting.join(5)

    def test_has_room_again(self, narrow_server: ServerProcess):
        with narrow_server.client() as client:
            for _ in range(10):
                answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "n": 2})
                assert answer.status_code == 200


def test_keepalive_comments(server: ServerProcess):
    body = {**STREAM, "max_tokens": 2, "seed": SLOW_SEED}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    comments = [line for line in lines if line.startswith((": waiting: prompt of 3 tokens", ": prefill: "))]
    assert len(comments) >= 2 and lines[-1] == "data: [DONE]"


def test_only_the_port_is_open(server: ServerProcess):
    """Every TCP socket of API process and engine that listens is the one loopback port."""
    listening = []
    for pid in (server.process.pid, server.engine_pid()):
        inodes = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile, so it does not listen
                target = str(fd.readlink())
                if target.startswith("socket:"):
                    inodes.add(target[8:-1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    listening.append(fields[1])
    assert listening == [f"0100007F:{server.port:04X}"]


def test_the_api_process_imports_no_torch():
    code = (
        "import sys, proa.server.launch\n"
        "bad = {'torch', 'transformers', 'numpy', 'proa.engine', 'proa.native', 'proa.weights'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_large_prompts_leave_no_memory_behind(start_server):
    server = start_server()
    with server.client(timeout=60) as client:
        assert client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        before = server.rss_bytes()
        answer = client.post("/tokenize", json={"prompt": "The quick brown fox. " * 200_000})
        assert answer.status_code == 200 and answer.json()["count"] > 1_000_000
    server.wait(lambda: server.rss_bytes() - before < 64 * MIB, 10.0, "memory given back")


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_large_prompts_do_not_hold_up_others(server: ServerProcess, field: str):
    """Parsing, rendering, tokenizing and answering happen beside the event loop, which answers others meanwhile."""
    text = "The quick brown fox <b> jumps over [the] lazy dog.\n" * 30_000
    body = {"prompt": text} if field == "prompt" else {"messages": [{"role": "user", "content": text}]}
    seconds: list[float] = []

    def load() -> None:
        with server.client(timeout=60) as client:
            request = client.build_request("POST", "/tokenize", json={**body, "return_token_strs": True})
            started = time.monotonic()
            assert client.send(request).status_code == 200
            seconds.append(time.monotonic() - started)

    slowest = 0.0
    with server.client() as client:
        client.get("/livez")
        thread = threading.Thread(target=load)
        thread.start()
        while thread.is_alive():
            started = time.monotonic()
            assert client.get("/livez").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
    # Were it done on the event loop, one of these would have waited for nearly all of it.
    assert slowest < seconds[0] / 2
