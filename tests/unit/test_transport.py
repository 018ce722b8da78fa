from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import zmq

from proa.core.errors import ConfigError
from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import Abort, EngineStats, FlushCache, Generate, Shutdown, StepOutput, TokenOutput
from proa.ipc.transport import ClientEndpoint, EngineAddresses, EngineEndpoint


@pytest.fixture
def addresses(tmp_path: Path) -> EngineAddresses:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    return EngineAddresses.in_directory(directory)


def test_round_trip_in_both_directions(addresses: EngineAddresses) -> None:
    requests = [
        Generate(rid="a", token_ids=[1, 2, 163_839], sampling=SamplingParams(seed=2**63 - 1, logit_bias={5: -100.0})),
        Abort("a"),
        FlushCache("x"),
        Shutdown(),
    ]
    answer = StepOutput([TokenOutput(rid="a", token_ids=[7], finish_reason="stop", matched_stop=7)], EngineStats())

    async def scenario() -> None:
        client = ClientEndpoint(addresses)
        engine = EngineEndpoint(addresses)
        for request in requests:
            await client.send(request)
        received = []
        while len(received) < len(requests):
            assert await asyncio.to_thread(engine.poll, 5.0)
            received += engine.receive()
        assert received == requests
        assert engine.receive() == []
        engine.send(answer)
        assert await asyncio.wait_for(client.receive(), 5) == answer
        engine.close()
        client.close()

    asyncio.run(scenario())


def test_rubbish_is_dropped_and_later_messages_arrive(
    addresses: EngineAddresses, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.bind(addresses.to_engine)
    engine = EngineEndpoint(addresses)
    deep = b"\x82\xa4type\xa5abort\xa1x" + b"\x91" * 200_000 + b"\xc0"
    rubbish = (b"\x00\xff" * 40, b"", b"\x80\x04\x95\x00.", b"\x81\xa4type\xa7unknown", deep)
    for data in rubbish:
        sender.send(data)
    sender.send(b"\x82\xa4type\xa5abort\xa3rid\xa1z")
    received = []
    with caplog.at_level(logging.WARNING):
        while not received:
            assert engine.poll(5.0)
            received += engine.receive()
    assert received == [Abort("z")]
    assert caplog.text.count("dropped a message") == len(rubbish)
    engine.close()
    sender.close()
    context.term()


def test_directory_must_be_private_and_short(tmp_path: Path) -> None:
    open_directory = tmp_path / "open"
    open_directory.mkdir()
    open_directory.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        EngineAddresses.in_directory(open_directory)
    deep = tmp_path / ("d" * 100)
    deep.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="TMPDIR"):
        EngineAddresses.in_directory(deep)


def test_closing_removes_socket_files(addresses: EngineAddresses) -> None:
    path = Path(addresses.to_engine.removeprefix("ipc://"))

    async def scenario() -> tuple[bool, bool]:
        client = ClientEndpoint(addresses)
        was_there = await asyncio.to_thread(path.is_socket)
        client.close()
        return was_there, await asyncio.to_thread(path.exists)

    assert asyncio.run(scenario()) == (True, False)
