"""What `proa gateway` adds to the chunks of a stream and to its first byte, beside the same streams without it.

    python benchmarks/serving/gateway.py [--streams 64] [--chunks 100] [--step 0.03] [--rounds 3] [--jsonl FILE]
    python benchmarks/serving/gateway.py --proxy httpx            # a plain proxy on another HTTP client

Engine, gateway and clients are processes of their own. Each step the engine writes a chunk to every stream, all at once
as after a forward pass, or over the whole step with `--spread`. A chunk carries the time at which it was written, so
that the client that reads it knows its latency. Requests come `--gap` seconds apart. Direct and through the gateway
take turns; a round adds the difference of the two's percentiles, and the median of the rounds stands for all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn
import uvloop
from speed import fingerprint
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.http_settings import HttpSettings
from proa.gateway.launch import run as run_gateway

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MARK = b'data: {"id": "'
# As much as a chunk of a chat stream has.
FILLER = (
    b'", "object": "chat.completion.chunk", "choices": [{"delta": {"content": " word"}}], "pad": "' + b"." * 90 + b'"}'
)
BODY = b'{"model": "bench", "stream": true, "messages": [{"role": "user", "content": "Go."}]}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY), BODY,
)  # fmt: skip
CONTEXT = multiprocessing.get_context("spawn")


class Engine:
    """Answers a POST with `chunks` chunks, one per step, and anything else with 200."""

    def __init__(self, chunks: int, step: float, spread: bool) -> None:
        self.chunks, self.step, self.spread = chunks, step, spread
        self.left: dict[asyncio.StreamWriter, int] = {}

    async def run(self, port: int) -> None:
        async with await asyncio.start_server(self.connection, "127.0.0.1", port, backlog=1024):
            while True:
                await asyncio.sleep(self.step / 10 if self.spread else self.step)
                for writer in list(self.left):
                    self.write(writer)
                    if self.spread:
                        await asyncio.sleep(self.step / (len(self.left) + 1))

    def write(self, writer: asyncio.StreamWriter) -> None:
        event = MARK + b"%d" % time.perf_counter_ns() + FILLER + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.left[writer] -= 1
        if self.left[writer] == 0:
            del self.left[writer]
            writer.write(b"0\r\n\r\n")
            writer.close()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(HEAD)
            self.left[writer] = self.chunks
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()


class Client(asyncio.Protocol):
    """One stream. Times in nanoseconds."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.latencies: list[int] = []
        self.first_byte = 0
        self.rest = b""

    def connection_made(self, transport: Any) -> None:
        self.sent = time.perf_counter_ns()
        transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        self.first_byte = self.first_byte or now - self.sent
        *events, self.rest = (self.rest + data).split(b"\n\n")
        for event in events:
            if (at := event.find(MARK)) >= 0:
                self.latencies.append(now - int(event[at + len(MARK) :].split(b'"', 1)[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(exc)


async def read_streams(port: int, streams: int, gap: float) -> tuple[list[int], list[int]]:
    """Latencies of all chunks, and times from request to first byte."""
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(streams):
        clients.append((await loop.create_connection(Client, "127.0.0.1", port))[1])
        await asyncio.sleep(gap)
    await asyncio.gather(*(client.done for client in clients))
    return [t for client in clients for t in client.latencies], [client.first_byte for client in clients]


def clients_main(port: int, streams: int, gap: float, results: Any) -> None:
    results.put(uvloop.run(read_streams(port, streams, gap)))


def gateway_main(port: int, engine_port: int, engine: tuple[str, ...]) -> None:
    """The gateway, which starts the engine."""
    model = ModelConfig(name="bench", backend="command", command=engine, port=engine_port, ready_path="/health")
    run_gateway(GatewayConfig(models={"bench": model}, port=port), HttpSettings())


def httpx_main(port: int, engine_port: int, engine: tuple[str, ...]) -> None:
    """The shortest proxy on httpx, and the engine."""
    child = subprocess.Popen(engine)
    signal.signal(signal.SIGTERM, lambda *_: (child.terminate(), sys.exit()))
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine_port}", timeout=None, limits=httpx.Limits())

    async def forward(request: Any) -> StreamingResponse:
        sent = client.build_request("POST", request.url.path, content=await request.body())
        answer = await client.send(sent, stream=True)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type="text/event-stream")

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="critical", loop="uvloop", http="httptools")


PROXIES = {"gateway": gateway_main, "httpx": httpx_main}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def percentile(values: list[int], part: float) -> float:
    """In milliseconds."""
    return round(sorted(values)[min(int(len(values) * part), len(values) - 1)] / 1e6, 3)


def measure(port: int, options: argparse.Namespace) -> tuple[list[int], list[int]]:
    results = CONTEXT.Queue()
    process = CONTEXT.Process(target=clients_main, args=(port, options.streams, options.gap, results))
    process.start()
    answer = results.get(timeout=300)
    process.join()
    return answer


def wait_until_answered(port: int) -> None:
    for _ in range(600):
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", BODY)
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("no answer")


def bench(options: argparse.Namespace) -> dict[str, Any]:
    engine_port, port = free_port(), free_port()
    settings = ["--chunks", str(options.chunks), "--step", str(options.step), *(["--spread"] if options.spread else [])]
    engine = (sys.executable, __file__, "--engine", str(engine_port), *settings)
    proxy = CONTEXT.Process(target=PROXIES[options.proxy], args=(port, engine_port, engine))
    proxy.start()
    rounds = []
    cpu = 0.0
    try:
        wait_until_answered(port)
        for _ in range(options.rounds):
            direct = measure(engine_port, options)
            before = sum(psutil.Process(proxy.pid).cpu_times()[:2])
            through = measure(port, options)
            cpu += sum(psutil.Process(proxy.pid).cpu_times()[:2]) - before
            assert len(direct[0]) == len(through[0]) == options.streams * options.chunks, "chunks are missing"
            rounds.append((direct, through))
    finally:
        proxy.terminate()
        proxy.join()
    cpu_us = cpu / (options.streams * options.chunks * options.rounds) * 1e6
    result: dict[str, Any] = {"proxy": options.proxy, "cpu_us_per_chunk": round(cpu_us, 1)}
    for index, what in enumerate(("chunk", "first_byte")):
        for part in (0.5, 0.99):
            pairs = [(percentile(d[index], part), percentile(t[index], part)) for d, t in rounds]
            result[f"{what}_p{100 * part:.0f}_ms"] = {
                "direct": statistics.median(d for d, _ in pairs),
                "through": statistics.median(t for _, t in pairs),
                "added": [round(t - d, 3) for d, t in pairs],
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--step", type=float, default=0.03)
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--proxy", choices=sorted(PROXIES), default="gateway")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--engine", type=int, metavar="PORT", help="be the engine")
    options = parser.parse_args()
    if options.engine is not None:
        uvloop.run(Engine(options.chunks, options.step, options.spread).run(options.engine))
    result = bench(options)
    for key, row in result.items():
        if isinstance(row, dict):
            added = statistics.median(row["added"])
            print(f"{key:18} direct {row['direct']:7.3f}  through {row['through']:7.3f}  added {added:7.3f}")
            print(f"{'':18} added by round: {row['added']}")
    print(f"{result['cpu_us_per_chunk']} us of CPU per chunk in the {options.proxy} process")
    if options.jsonl is not None:
        settings = {key: getattr(options, key) for key in ("streams", "chunks", "step", "spread", "gap", "rounds")}
        with options.jsonl.open("a") as file:
            file.write(json.dumps({"machine": fingerprint(), **settings, **result}) + "\n")


if __name__ == "__main__":
    main()
