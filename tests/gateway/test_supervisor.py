"""The supervisor with engines of every temper: what a proxy relies on."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from engines import FAKE, PYTHON, is_alive, until

from proa.gateway.config import GatewayConfig
from proa.gateway.errors import (
    EngineCoolingDownError,
    EngineFailedError,
    EngineStartingError,
    GatewayStoppingError,
    UnknownModelError,
)
from proa.gateway.state import State

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def status(supervisor, name="m"):
    return next(entry for entry in supervisor.status() if entry.name == name)


async def ask(lease, **fields) -> httpx.Response:
    async with httpx.AsyncClient(base_url=lease.engine.base_url, headers=lease.engine.headers, timeout=30) as client:
        return await client.post("/v1/chat/completions", json={**ASK, **fields})


async def test_fifty_first_requests_start_one_engine(supervise, fake):
    model = fake("m", "--start-delay", "0.1")
    supervisor = await supervise(model)
    leases = await asyncio.gather(*(supervisor.acquire("m") for _ in range(50)))
    assert len(model.journal("started")) == 1
    assert len({lease.engine.base_url for lease in leases}) == 1
    assert (await ask(leases[0])).status_code == 200
    assert status(supervisor).running == 50
    for lease in leases:
        lease.release()
        lease.release()
    assert status(supervisor).running == 0
    assert status(supervisor).pid == model.pids[0]


async def test_an_unknown_model_is_answered_with_those_there_are(supervise, fake):
    supervisor = await supervise(fake("m", aliases={"fast": {}}))
    with pytest.raises(UnknownModelError, match=r"m \| fast"):
        supervisor.ticket("other")
    with pytest.raises(UnknownModelError):
        supervisor.log("other")


async def test_only_the_gateway_knows_the_key_of_a_run(supervise, fake, monkeypatch):
    monkeypatch.setenv("PROA_API_KEY", "the gateway's own")
    model = fake("m", env={"FAKE_API_KEY": "${API_KEY}", "SEEN": "${HOST}:${PORT} ${NAME} ${OTHER}"})
    supervisor = await supervise(model)
    lease = await supervisor.acquire("m")
    assert (await ask(lease)).status_code == 200
    environment = Path(f"/proc/{lease.engine.pid}/environ").read_bytes().split(b"\0")  # noqa: ASYNC240
    assert not any(b"the gateway's own" in entry for entry in environment)
    address = lease.engine.base_url.removeprefix("http://")
    assert f"SEEN={address} m ${{OTHER}}".encode() in environment
    lease.engine.headers = {"authorization": "Bearer guess"}
    assert (await ask(lease)).status_code == 401
    lease.release()


async def test_a_model_without_a_place_for_the_key_gets_none(supervise, fake):
    supervisor = await supervise(fake("m"))
    assert (await supervisor.acquire("m")).engine.headers == {}


async def test_a_crash_at_start_is_told_to_all_who_wait_and_cools_down(supervise, fake):
    supervisor = await supervise(fake("m", "--crash-at-start", "3"))
    tickets = [supervisor.ticket("m") for _ in range(3)]
    for ticket in tickets:
        with pytest.raises(EngineFailedError, match=r"exit status 3; its last line: out of memory: this is why"):
            await ticket.lease()
    with pytest.raises(EngineCoolingDownError) as failure:
        supervisor.ticket("m")
    assert 5 <= failure.value.retry_after_s <= 10
    assert status(supervisor).state is State.FAILED and status(supervisor).failures == 1
    assert "out of memory: this is why" in supervisor.log("m").tail()
    with pytest.raises(EngineFailedError):
        await supervisor.load("m")
    assert status(supervisor).failures == 1


async def test_a_crash_while_serving_is_noticed_without_a_request(supervise, fake):
    supervisor = await supervise(fake("m", "--crash-after", "1"))
    lease = await supervisor.acquire("m")
    with pytest.raises(httpx.HTTPError):
        await ask(lease, stream=True)
    await until(lambda: status(supervisor).state is State.FAILED)
    assert "exit status 9" in lease.engine.end_reason
    lease.release()


async def test_stopping_ends_stubborn_engines_and_their_children(supervise, fake):
    model = fake("m", "--ignore-sigterm", "--fork", "2", "--fork-escape", stop_timeout=0.2)
    supervisor = await supervise(model)
    await supervisor.load("m")
    pids = model.pids
    assert len(pids) == 3 and all(map(is_alive, pids))
    await supervisor.unload("m")
    assert not any(map(is_alive, pids))
    assert model.journal("sigterm")
    assert status(supervisor).state is State.STOPPED and status(supervisor).reason == "unloaded"


@pytest.mark.parametrize(("bind_delay", "answer"), [("0", b"404 Not Found"), ("0.5", b"200 OK")])
async def test_a_port_taken_between_choice_and_start_is_left_for_another(
    supervise, fake, monkeypatch, bind_delay, answer
):
    """Once the engine ends because it cannot listen, once another server answers the ready check before it tries."""

    async def stranger(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\nok" % answer)
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    taken = server.sockets[0].getsockname()[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    ports = iter([taken, free])
    monkeypatch.setattr("proa.gateway.engine_run.free_port", lambda _: next(ports))
    model = fake("m", "--bind-delay", bind_delay, backend="llama-server")
    supervisor = await supervise(model)
    lease = await supervisor.acquire("m")
    assert lease.engine.base_url.endswith(f":{free}")
    assert (await ask(lease)).status_code == 200
    assert any(f"port {taken} was taken" in line for line in supervisor.log("m").tail())
    assert status(supervisor).failures == 0
    server.close()


async def test_a_fixed_port_in_use_is_an_error_that_says_so(supervise, fake):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        model = fake("m", port=port)
        supervisor = await supervise(model)
        with pytest.raises(EngineFailedError, match=f"port {port} is in use"):
            await supervisor.acquire("m")
    assert not model.journal("started")


async def test_a_start_without_progress_is_given_up(supervise, fake):
    """Its web server writes a line for every ready check, each with another port."""
    options = ("--start-delay", "0.2", "--load-bytes", "1000", "--stall-at", "0.5", "--access-log")
    model = fake("m", *options, backend="proa", stall_timeout=1.5)
    supervisor = await supervise(model)
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailedError, match="no progress of its start for 2 s"):
            await supervisor.acquire("m")
    assert status(supervisor).state is State.FAILED
    assert not any(map(is_alive, model.pids))


@pytest.mark.parametrize(("backend", "options"), [("proa", ("--load-bytes", "100000")), ("command", ("--load-log",))])
async def test_a_slow_start_with_progress_is_not(supervise, fake, backend, options):
    supervisor = await supervise(fake("m", "--start-delay", "2", *options, backend=backend, stall_timeout=1.0))
    (await supervisor.acquire("m")).release()


async def test_progress_is_reported_bytes_and_time_left(supervise, fake):
    supervisor = await supervise(fake("m", "--start-delay", "1", "--load-bytes", "1000000", backend="proa"))
    seen = []
    with supervisor.ticket("m") as ticket:
        while not await ticket.wait(0.02):
            seen.append(ticket.progress)
        assert ticket.progress.fraction == 1.0
    on_the_way = [p for p in seen if p.fraction and p.eta]
    assert on_the_way and all(p.bytes_total == 1_000_000 and p.eta < 20.0 for p in on_the_way)
    assert "ETA" in str(on_the_way[-1])


async def test_refused_requests_learn_when_to_come_back(supervise, fake):
    model = fake("m", "--start-delay", "0.3", while_starting="refuse", cancel_load_after=0.0)
    supervisor = await supervise(model)
    with pytest.raises(EngineStartingError):
        supervisor.ticket("m")
    started = time.monotonic()
    await until(lambda: status(supervisor).state is State.READY)
    # The next start will take as long as the last one did.
    expected = math.ceil(time.monotonic() - started + 0.1)
    await supervisor.unload("m")
    with pytest.raises(EngineStartingError) as failure:
        supervisor.ticket("m")
    assert failure.value.retry_after_s <= expected
    await until(lambda: status(supervisor).state is State.READY)
    (await supervisor.acquire("m")).release()


async def test_a_load_nobody_waits_for_is_cancelled(supervise, fake):
    model = fake("m", "--start-delay", "60", cancel_load_after=0.05)
    supervisor = await supervise(model)
    first, second = supervisor.ticket("m"), supervisor.ticket("m")
    await until(lambda: model.journal("started"))
    first.close()
    await asyncio.sleep(0.1)
    assert status(supervisor).state is State.STARTING
    second.close()
    await until(lambda: status(supervisor).state is State.STOPPED)
    assert not any(map(is_alive, model.pids))
    assert status(supervisor).failures == 0


async def test_a_cancelled_waiter_holds_no_place(supervise, fake):
    supervisor = await supervise(fake("m", "--start-delay", "0.2"))
    waiting = [asyncio.create_task(supervisor.acquire("m")) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    (await waiting[1]).release()
    assert (status(supervisor).running, status(supervisor).waiting) == (0, 0)


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_holds_no_place(supervise, fake):
    supervisor = await supervise(fake("m", max_running=1))
    lease = await supervisor.acquire("m")
    waiting = asyncio.create_task(supervisor.acquire("m"))
    await asyncio.sleep(0)
    lease.release()
    assert status(supervisor).running == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert status(supervisor).running == 0


async def test_an_idle_engine_is_unloaded(supervise, fake):
    supervisor = await supervise(fake("m", ttl=0.1))
    (await supervisor.acquire("m")).release()
    assert status(supervisor).idle is not None
    await until(lambda: status(supervisor).state is State.STOPPED)


async def test_swaps_under_load_lose_no_request(supervise, fake):
    models = [fake(name, "--chunks", "3", "--chunk-delay", "0.01", memory={"ram": 10}) for name in ("a", "b")]
    supervisor = await supervise(*models, memory_budget={"ram": 15}, patience=0.05)

    async def client(number: int) -> list[str]:
        texts = []
        for turn in range(3):
            with supervisor.ticket("ab"[(number + turn) % 2]) as ticket:
                texts.append((await ask(await ticket.lease(), stream=True)).text)
        return texts

    texts = [text for some in await asyncio.gather(*(client(number) for number in range(8))) for text in some]
    assert len(texts) == 24 and len(set(texts)) == 1 and texts[0].endswith("data: [DONE]\n\n")
    assert max(len(model.journal("started")) for model in models) > 1, "nothing was swapped"


async def test_a_new_configuration_takes_over_without_cutting_off(supervise, fake):
    model = fake("m")
    supervisor = await supervise(model)
    lease = await supervisor.acquire("m")
    changed = replace(model.config, args=("--chunks", "1"))
    await supervisor.reconfigure(GatewayConfig(models={"m": changed, "n": fake("n", preload=True).config}))
    ticket = supervisor.ticket("m")
    assert (await ask(lease)).status_code == 200 and not ticket.is_settled
    lease.release()
    await ticket.lease()
    assert "--chunks" in model.journal("started")[-1]["argv"]
    ticket.close()
    await until(lambda: status(supervisor, "n").state is State.READY)
    await supervisor.reconfigure(GatewayConfig(models={"m": changed}))
    await until(lambda: [entry.name for entry in supervisor.status()] == ["m"])
    with pytest.raises(UnknownModelError):
        supervisor.log("n")


async def test_kt_without_its_flags_is_refused_before_it_is_started(supervise, fake, tmp_path):
    model = fake("m", backend="kt", kt_weight_path=str(tmp_path), args=("--tp-size", "1"))
    supervisor = await supervise(model)
    lease = await supervisor.acquire("m")
    argv = model.journal("started")[0]["argv"]
    for flag, value in (("--model", str(tmp_path)), ("--kt-weight-path", str(tmp_path)), ("--tp-size", "1")):
        assert argv[argv.index(flag) + 1] == value
    key = argv[argv.index("--api-key") + 1]
    assert lease.engine.headers["authorization"] == f"Bearer {key}"
    log = supervisor.log("m").tail()
    assert any("--api-key KEY" in line for line in log) and not any(key in line for line in log)

    plain = fake("p", "--hide-flags=--kt-weight-path,--tp-size", backend="kt", kt_weight_path=str(tmp_path))
    plain.config = replace(plain.config, args=("--tp-size=1",))
    supervisor = await supervise(plain)
    with pytest.raises(EngineFailedError, match=r"without --kt-weight-path, --tp-size.*sglang-kt"):
        await supervisor.acquire("p")
    assert not plain.journal("started")


async def test_what_cannot_work_is_said_before_a_start(supervise, fake, tmp_path):
    gone = fake("gone", backend="proa", path=str(tmp_path / "missing"))
    broken = fake("broken", backend="kt")
    broken.config = replace(broken.config, command=(*PYTHON, str(FAKE) + ".missing"))
    nowhere = fake("nowhere")
    nowhere.config = replace(nowhere.config, command=("no-such-program",))
    supervisor = await supervise(gone, broken, nowhere)
    for name, reason in (("gone", "missing"), ("broken", "exit status 2 of"), ("nowhere", "no-such-program")):
        with pytest.raises(EngineFailedError, match=reason):
            await supervisor.acquire(name)


async def test_events_tell_of_every_state(supervise, fake):
    supervisor = await supervise(fake("m"))
    with supervisor.events.subscribe() as events:
        await supervisor.load("m")
        await supervisor.unload("m")
        seen = []
        while not seen or seen[-1].data.get("state") != "stopped":
            seen.append(await asyncio.wait_for(anext(events), 30))
    states = [event.data["state"] for event in seen if event.kind == "state"]
    assert states == ["starting", "ready", "stopping", "stopped"]
    assert "loading" in {event.data["phase"] for event in seen if event.kind == "progress"}
    numbers = [event.number for event in seen]
    assert numbers == sorted(set(numbers))


async def test_preloaded_models_load_at_the_start_and_loads_are_shared(supervise, fake):
    model = fake("m", "--start-delay", "0.1", preload=True)
    supervisor = await supervise(model)
    await asyncio.gather(*(supervisor.load("m") for _ in range(3)))
    await supervisor.load("m")
    assert len(model.journal("started")) == 1


async def test_closing_refuses_and_cleans_up(supervise, fake):
    model, slow = fake("m"), fake("slow", "--start-delay", "60")
    supervisor = await supervise(model, slow)
    await supervisor.load("m")
    ticket = supervisor.ticket("slow")
    await until(lambda: slow.journal("started"))
    await supervisor.close()
    with pytest.raises(GatewayStoppingError):
        await ticket.lease()
    with pytest.raises(GatewayStoppingError):
        supervisor.ticket("m")
    with pytest.raises(GatewayStoppingError):
        await supervisor.load("m")
    assert not any(map(is_alive, model.pids + slow.pids))


async def test_one_installation_at_a_time_and_none_for_a_start_that_is_ended(supervise, fake):
    model = fake("m", backend="kt", auto_build=True)
    supervisor = await supervise(model)
    await supervisor._installing.acquire()
    ticket = supervisor.ticket("m")
    await asyncio.sleep(0.1)
    assert not model.journal("started")
    await supervisor.unload("m")
    with pytest.raises(EngineFailedError, match="unloaded"):
        await ticket.lease()
    second = supervisor.ticket("m")
    supervisor._installing.release()
    await second.lease()
    assert not supervisor._installing.locked()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError("no more processes"), "could not be started: no more"), (KeyError("x"), "see its log")],
)
async def test_a_start_that_fails_in_the_gateway_is_a_failure_like_others(
    supervise, fake, monkeypatch, caplog, error, reason
):
    async def fail(*_):
        raise error

    monkeypatch.setattr("proa.gateway.engine_run.KeptProcess.start", fail)
    supervisor = await supervise(fake("m"))
    with pytest.raises(EngineFailedError, match=reason):
        await supervisor.acquire("m")
    assert status(supervisor).state is State.FAILED
    assert ("KeyError" in caplog.text) == isinstance(error, KeyError)


async def test_halting_before_the_process_runs_starts_none(supervise, fake, monkeypatch):
    model = fake("m")
    supervisor = await supervise(model)
    ticket = supervisor.ticket("m")
    await supervisor.unload("m")
    with pytest.raises(EngineFailedError):
        await ticket.lease()
    assert not model.journal("started") and status(supervisor).state is State.STOPPED
