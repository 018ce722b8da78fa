"""Logs and events: bounded, in order, and nobody who reads them slowly holds up the rest."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import pytest

from proa.gateway.errors import EngineFailedError
from proa.gateway.event_bus import EventBus
from proa.gateway.log_ring import LogRing
from proa.gateway.metrics import Metrics
from proa.gateway.ports import free_port, is_free, is_listener
from proa.gateway.status import GatewayEvent


def test_a_log_keeps_the_last_lines():
    ring = LogRing(3)
    for number in range(5):
        ring.write(f"line {number}")
    assert ring.tail() == ["line 2", "line 3", "line 4"]
    assert ring.tail(1) == ["line 4"] and ring.tail(0) == [] and ring.tail(9) == ring.tail()
    assert ring.written == 5
    ring.write("x" * 10_000)
    assert len(ring.tail(1)[0]) == 8192 + len(" ...")


async def test_a_follower_gets_every_line_and_skips_what_fell_out():
    ring = LogRing(3)
    ring.write("before")
    lines = ring.follow(1)
    assert await anext(lines) == "before"
    reading = asyncio.create_task(anext(lines))
    await asyncio.sleep(0)
    ring.write("next")
    assert await reading == "next"
    for number in range(10):
        ring.write(str(number))
    assert [await anext(lines) for _ in range(3)] == ["7", "8", "9"]


async def test_events_are_numbered_and_slow_observers_miss_the_oldest():
    bus = EventBus(clock=lambda: 1.5)
    bus.publish("state", "before")
    with bus.subscribe() as events, bus.subscribe() as slow:
        bus.publish("state", "m", state="ready", reason=None)
        event = await anext(events)
        assert event == GatewayEvent(2, 1.5, "state", "m", {"state": "ready"})
        for _ in range(300):
            bus.publish("progress", "m")
        assert (await anext(slow)).number == 302 - 255
    bus.publish("state", "after")


def test_ports():
    port = free_port("127.0.0.1")
    assert is_free("127.0.0.1", port) and is_listener([os.getpid()], port) is None
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)
        assert is_listener([os.getpid()], port) is True
        assert is_listener([os.getppid(), 1 << 30], port) is False


def test_how_long_a_load_took_does_not_depend_on_the_time_of_day():
    seconds = iter([100.0, 103.0])
    metrics = Metrics(list, clock=seconds.__next__)
    metrics.observe(GatewayEvent(1, 1e9, "state", "m", {"state": "starting"}))
    metrics.observe(GatewayEvent(2, 1.0, "state", "m", {"state": "ready"}))
    assert 'proa:gateway_load_seconds_sum{model="m"} 3.0' in metrics.render().decode()


async def test_an_engine_that_prints_its_key_puts_it_in_no_log(fake, supervise):
    model = fake("m", env={"KEY": "${API_KEY}"})
    model.config = replace(model.config, command=("sh", "-c", "echo the key is $KEY, port ${PORT}; exit 3"))
    supervisor = await supervise(model)
    with pytest.raises(EngineFailedError, match="the key is KEY") as failed:
        await supervisor.load("m")
    assert any(line.startswith("the key is KEY,") for line in supervisor.log("m").tail())
    assert "the key is KEY" in str(failed.value)
