"""The engine as a process of its own, over the real transport."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from fake_model import LONG, RAISE, SLOW, greedy

from proa.core.sampling_params import SamplingParams
from proa.engine.config import EngineConfig
from proa.engine.loop import EXIT_FAULT, EXIT_OK, EXIT_USER
from proa.ipc.messages import (
    Abort,
    Fatal,
    FlushCache,
    Flushed,
    FromEngine,
    Generate,
    Loading,
    Ready,
    Shutdown,
    StepOutput,
)
from proa.ipc.transport import ClientEndpoint, EngineAddresses

SCRIPT = Path(__file__).parent / "fake_model_engine.py"
TIMEOUT_S = 20.0
Message = TypeVar("Message")


class Client:
    def __init__(self, endpoint: ClientEndpoint, process: subprocess.Popen[bytes]) -> None:
        self.endpoint = endpoint
        self.process = process
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.last: StepOutput | None = None

    async def generate(self, rid: str, prompt: list[int], **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        await self.endpoint.send(Generate(rid=rid, token_ids=prompt, sampling=params))

    async def receive(self) -> FromEngine:
        message = await asyncio.wait_for(self.endpoint.receive(), TIMEOUT_S)
        if isinstance(message, StepOutput):
            self.last = message
            for output in message.outputs:
                self.tokens.setdefault(output.rid, []).extend(output.token_ids)
                if output.finish_reason:
                    self.reasons[output.rid] = output.finish_reason
        return message

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.receive()

    async def expect(self, kind: type[Message]) -> Message:
        while True:
            message = await self.receive()
            if isinstance(message, kind):
                return message

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, TIMEOUT_S)


def start(directory: Path, **config: Any) -> tuple[ClientEndpoint, subprocess.Popen[bytes]]:
    directory.chmod(0o700)
    addresses = EngineAddresses.in_directory(directory)
    endpoint = ClientEndpoint(addresses)
    settings = {"model_path": "", "max_total_tokens": 1024, "block_size": 4, "parent_pid": os.getpid(), **config}
    data = EngineConfig(to_engine=addresses.to_engine, from_engine=addresses.from_engine, **settings).to_json()
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.close()
    return endpoint, process


@asynccontextmanager
async def engine(directory: Path, *, ready: bool = True, **config: Any) -> AsyncIterator[Client]:
    endpoint, process = start(directory, **config)
    client = Client(endpoint, process)
    try:
        if ready:
            await client.expect(Ready)
        yield client
    finally:
        process.kill()
        process.wait()
        endpoint.close()


async def test_life_of_an_engine(tmp_path: Path) -> None:
    async with engine(tmp_path, ready=False, random_seed=1) as client:
        assert isinstance(await client.receive(), Loading)
        ready = await client.expect(Ready)
        assert (ready.vocab_size, ready.max_model_len, ready.kv_tokens_total) == (512, 1024, 1024)
        assert ready.max_running_requests == 16
        assert "lowered" in ready.info["context_length"]

        for i in range(20):
            await client.generate(f"r{i}", [20 + i] * (3 + 5 * i), max_tokens=10)
        await client.until(lambda: len(client.reasons) == 20)
        assert set(client.reasons.values()) == {"length"}
        for i in range(20):
            assert client.tokens[f"r{i}"] == greedy([20 + i] * (3 + 5 * i), 10)

        await client.generate("bad", [30, RAISE], max_tokens=5)
        await client.generate("good", [30, 31], max_tokens=5)
        await client.until(lambda: len(client.reasons) == 22)
        assert (client.reasons["bad"], client.reasons["good"]) == ("error", "length")

        await client.endpoint.send(FlushCache("f"))
        assert await client.expect(Flushed) == Flushed("f", ok=True)
        await client.endpoint.send(Shutdown())
        assert await client.exit_code() == EXIT_OK


async def test_idle_engine_sends_heartbeats_and_sleeps(tmp_path: Path) -> None:
    async with engine(tmp_path) as client:
        await client.expect(StepOutput)
        process = psutil.Process(client.process.pid)
        before, started = sum(process.cpu_times()[:2]), time.monotonic()
        for _ in range(2):
            assert (await client.expect(StepOutput)).outputs == []
        assert 1.5 < time.monotonic() - started < 6.0
        assert sum(process.cpu_times()[:2]) - before < 0.2


async def test_abort_takes_effect_at_the_next_step(tmp_path: Path) -> None:
    # Every forward with this prompt takes 50 ms, and a chunk is 2 tokens: 3 s of prefill.
    async with engine(tmp_path, chunked_prefill_size=2) as client:
        await client.generate("slow", [SLOW] * 120, max_tokens=5)
        await client.expect(StepOutput)
        started = time.monotonic()
        await client.endpoint.send(Abort("slow"))
        await client.until(lambda: "slow" in client.reasons)
        assert client.reasons["slow"] == "abort"
        assert time.monotonic() - started < 1.0
        assert client.last is not None and client.last.stats.kv_tokens_used == 0


async def test_abort_and_shutdown_take_effect_within_a_step(tmp_path: Path) -> None:
    # One chunk, whose forward takes 5 s.
    async with engine(tmp_path) as client:
        for rid in "ab":
            await client.generate(rid, [LONG] * 20, max_tokens=5)
            await asyncio.sleep(0.3)
            started = time.monotonic()
            if rid == "a":
                await client.endpoint.send(Abort("a"))
                await client.until(lambda: "a" in client.reasons)
                assert client.reasons["a"] == "abort"
                assert client.last is not None and client.last.stats.kv_tokens_used == 0
            else:
                await client.endpoint.send(Shutdown())
                assert await client.exit_code() == EXIT_OK
            assert time.monotonic() - started < 2.5, "half of the step was left"


async def test_heartbeats_between_the_layers_of_a_long_step(tmp_path: Path) -> None:
    async with engine(tmp_path) as client:
        await client.generate("long", [LONG] * 20, max_tokens=5)
        shares = []
        while len(shares) < 3:
            await client.expect(StepOutput)
            assert client.last is not None and not client.last.outputs
            if client.last.stats.prefill_tokens:
                assert client.last.stats.prefill_tokens == 20
                shares.append(client.last.stats.prefill_share)
        assert 0 < shares[0] < shares[1] < shares[2] < 1


async def test_requests_sent_while_loading_are_served(tmp_path: Path) -> None:
    async with engine(tmp_path, model_path="slow", ready=False) as client:
        await client.generate("early", [9], max_tokens=2)
        await client.expect(Loading)
        await client.expect(Ready)
        await client.until(lambda: "early" in client.reasons)
        assert client.tokens["early"] == greedy([9], 2)


async def test_shutdown_while_loading(tmp_path: Path) -> None:
    async with engine(tmp_path, model_path="slow", ready=False) as client:
        await client.expect(Loading)
        await client.endpoint.send(Shutdown())
        assert await client.exit_code() == EXIT_OK


async def test_shutdown_while_generating(tmp_path: Path) -> None:
    async with engine(tmp_path) as client:
        await client.generate("r", [9], max_tokens=900)
        await client.expect(StepOutput)
        await client.endpoint.send(Shutdown())
        assert await client.exit_code() == EXIT_OK


@pytest.mark.parametrize(
    ("config", "user", "code", "text"),
    [
        ({"model_path": "damaged"}, True, EXIT_USER, "[model.safetensors] expected 8 bytes of header"),
        ({"context_length": 4096}, True, EXIT_USER, "[context_length] expected at most 1024"),
        ({"model_path": "bug"}, False, EXIT_FAULT, "loading hit a bug"),
        ({"model_path": "nomem"}, True, EXIT_USER, "[RAM] expected as much as was free"),
    ],
)
async def test_faults_at_load_are_reported(
    tmp_path: Path, config: dict[str, Any], user: bool, code: int, text: str
) -> None:
    async with engine(tmp_path, ready=False, **config) as client:
        fatal = await client.expect(Fatal)
        assert text in fatal.message and fatal.user == user
        assert await client.exit_code() == code


async def test_signals_of_the_terminal_are_left_to_the_parent(tmp_path: Path) -> None:
    async with engine(tmp_path) as client:
        client.process.send_signal(signal.SIGINT)
        client.process.send_signal(signal.SIGTERM)
        await client.generate("r", [9], max_tokens=3)
        await client.until(lambda: "r" in client.reasons)
        assert client.tokens["r"] == greedy([9], 3)


@pytest.mark.parametrize("model_path", ["", "slow"])
def test_engine_does_not_outlive_its_parent(tmp_path: Path, model_path: str) -> None:
    tmp_path.chmod(0o700)
    config = EngineConfig(model_path=model_path, to_engine=f"ipc://{tmp_path}/in", from_engine=f"ipc://{tmp_path}/out")
    parent_code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE)\n"
        "child.stdin.write(sys.argv[2].encode()); child.stdin.close()\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(SCRIPT), config.to_json().decode()], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + TIMEOUT_S
    # Threads of ZMQ and torch: the engine is up.
    while child.num_threads() < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=5.0)
    assert not alive or child.status() == psutil.STATUS_ZOMBIE


def test_a_config_that_cannot_be_read_ends_with_the_user_code() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT)], input=b'{"model_path": 3}', capture_output=True, timeout=30)
    assert result.returncode != 0
    assert b"engine config" in result.stderr


def test_config_and_transport_import_no_torch() -> None:
    code = (
        "import sys; import proa.engine.config, proa.ipc.transport, proa.ipc.messages; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'proa.native')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
