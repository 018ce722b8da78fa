"""An engine without a model: OpenAI's chat endpoint with every fault a gateway has to live with.

    fake_engine.py --port PORT [options]          (standard library only; runs with python -S -E)

It writes what happens to --journal, one JSON object a line: started, ready, request, finished, aborted, sigterm. The
same requests get the same bytes. Flags it does not know are ignored, so that it can stand in for any engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# What proxies are known to drop: reasoning, tool calls, log probabilities, comments, usage after the finish.
DELTAS = (
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Zwei\u2028Orte, 1\u00e9 heure."},
    {"content": "Hello"},
    {
        "tool_calls": [
            {"index": 0, "id": "functions.get:0", "type": "function", "function": {"name": "get", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"place": "\u6771\u4eac"}'}}]},
)
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 3}}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fake_engine", allow_abbrev=False)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0)
    add("--name", default="fake", help="model id")
    add("--journal", default="", help="file to append events to")
    add("--start-delay", type=float, default=0.0, help="seconds from listening to ready")
    add("--bind-delay", type=float, default=0.0, help="seconds before it listens")
    add("--load-bytes", type=int, default=0, help="bytes /readyz reports in all while it starts")
    add("--load-log", action="store_true", help="write a line at every step of loading")
    add("--access-log", action="store_true", help="write a line for every request, as web servers do")
    add("--stall-at", type=float, default=2.0, help="part of the load (0 to 1) at which it stops making progress")
    add("--crash-at-start", type=int, default=None, help="exit status, at once")
    add("--crash-flag", default="", help="crash at start only while this file exists")
    add("--crash-after", type=int, default=0, help="die in the middle of this request, counted from 1")
    add("--hang", action="store_true", help="accept requests and never answer")
    add("--chunks", type=int, default=0, help="further content chunks")
    add("--chunk-delay", type=float, default=0.0, help="seconds before each chunk")
    add("--first-delay", type=float, default=0.0, help="seconds before the response header")
    add("--ignore-sigterm", action="store_true")
    add("--fork", type=int, default=0, help="children that do nothing")
    add("--fork-escape", action="store_true", help="children leave the session, ignore SIGTERM and keep the pipes")
    add("--hide-flags", default="", help="comma-separated flags that --help does not show")
    return parser.parse_known_args(arguments)[0]


class FakeEngine:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.begin = time.monotonic()
        self.requests = self.running = self.most_running = self.aborted = self.finished = 0
        self.key = os.environ.get("FAKE_API_KEY", "")

    def note(self, event: str, **fields: object) -> None:
        if self.options.journal:
            line = json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **fields}) + "\n"
            descriptor = os.open(self.options.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, line.encode())
            os.close(descriptor)

    @property
    def loaded(self) -> float:
        """Part of the load that is done."""
        delay = self.options.start_delay
        part = 1.0 if delay <= 0 else min(1.0, (time.monotonic() - self.begin) / delay)
        return min(part, self.options.stall_at)

    @property
    def is_ready(self) -> bool:
        return self.loaded >= 1.0

    @property
    def may_crash(self) -> bool:
        return not self.options.crash_flag or Path(self.options.crash_flag).exists()

    async def serve(self) -> None:
        options = self.options
        self.note("started", port=options.port, argv=sys.argv[1:])
        print(f"fake engine {os.getpid()} starts", flush=True)
        if options.crash_at_start is not None and self.may_crash:
            print("out of memory: this is why", flush=True)
            sys.exit(options.crash_at_start)
        for _ in range(options.fork):
            if (child := os.fork()) == 0:
                idle_child(options.fork_escape)
            self.note("forked", child=child)
        if options.ignore_sigterm:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.note, "sigterm")
        await asyncio.sleep(options.bind_delay)
        server = await asyncio.start_server(self.connection, options.host, options.port, backlog=1024)
        async with server:
            loading = asyncio.create_task(self.load())
            await server.serve_forever()
            await loading

    async def load(self) -> None:
        while not self.is_ready:
            if self.options.load_log and self.loaded < self.options.stall_at:
                print(f"loading {100 * self.loaded:.1f} %", flush=True)
            await asyncio.sleep(0.02)
        self.note("ready")
        print("ready", flush=True)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.exchange(reader, writer):
                pass
        writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
        body = await read_body(reader, headers)
        if self.options.access_log:
            port = writer.get_extra_info("peername")[1]
            print(f'INFO: 127.0.0.1:{port} - "{first}" {200 if self.is_ready else 503}', flush=True)
        if method == "GET":
            await answer(writer, *self.get(path.split("?")[0]))
            return True
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            await answer(writer, 401, {"error": {"message": "wrong key"}})
            return True
        return await self.post(path, headers, body, reader, writer)

    def get(self, path: str) -> tuple[int, dict]:
        status = 200 if self.is_ready else 503
        if path in {"/readyz", "/health", "/health_generate"}:
            total = self.options.load_bytes
            load = {"load": {"bytes_done": int(total * self.loaded), "bytes_total": total}} if total else {}
            return status, {"status": "ok" if self.is_ready else "unavailable", **load}
        if path == "/v1/models":
            return status, {"object": "list", "data": [{"id": self.options.name, "object": "model"}]}
        if path == "/fake/state":
            names = ("requests", "running", "most_running", "aborted", "finished")
            return 200, {name: getattr(self, name) for name in names}
        return 404, {"error": {"message": "no such route"}}

    async def post(self, path: str, headers: dict, body: bytes, reader, writer) -> bool:
        self.requests += 1
        number = self.requests
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        request = json.loads(body or b"{}")
        self.note("request", number=number, path=path, headers=headers, body=request)
        # A client that goes away is seen as the end of its stream; nothing else comes before the answer is out.
        gone = asyncio.ensure_future(reader.read(1))
        answering = asyncio.ensure_future(self.respond(number, request, writer))
        try:
            await asyncio.wait([gone, answering], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or answering.exception():
                self.aborted += 1
                self.note("aborted", number=number)
                return False
            self.finished += 1
            self.note("finished", number=number)
            return answering.result()
        finally:
            self.running -= 1
            for task in (gone, answering):
                task.cancel()
            await asyncio.gather(gone, answering, return_exceptions=True)

    async def respond(self, number: int, request: dict, writer: asyncio.StreamWriter) -> bool:
        options = self.options
        if options.hang:
            await asyncio.sleep(3600)
        await asyncio.sleep(options.first_delay)
        if not request.get("stream"):
            message = {"role": "assistant", "content": "Hello", "echo": request}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            crash = number == options.crash_after
            if crash:
                os._exit(9)
            await answer(writer, 200, {"id": "chatcmpl-fake", "choices": [choice], "usage": USAGE})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
                     b"X-Engine: fake\r\nTransfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        for index, event in enumerate(events(request, options.chunks)):
            await asyncio.sleep(options.chunk_delay)
            if number == options.crash_after and index == 3:
                os._exit(9)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def events(request: dict, chunks: int) -> list[bytes]:
    """The SSE stream that answers `request`, event by event."""
    further = [{"content": f" {number}"} for number in range(chunks)]
    out = [b": keep-alive\n\n"]
    for delta in (*DELTAS, *further):
        choice = {"index": 0, "delta": delta, "logprobs": {"content": []}, "finish_reason": None}
        out.append(data({"id": "chatcmpl-fake", "object": "chat.completion.chunk", "choices": [choice]}))
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls", "matched_stop": 163586}
    out.append(data({"id": "chatcmpl-fake", "object": "chat.completion.chunk", "choices": [last]}))
    if (request.get("stream_options") or {}).get("include_usage"):
        out.append(data({"id": "chatcmpl-fake", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}))
    return [*out, b"data: [DONE]\n\n"]


def data(value: dict) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def answer(writer: asyncio.StreamWriter, status: int, value: dict) -> None:
    body = json.dumps(value).encode()
    reason = {200: "OK", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def read_body(reader: asyncio.StreamReader, headers: dict) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return b"".join(parts)
    return await reader.readexactly(int(headers.get("content-length", "0")))


def idle_child(escape: bool) -> None:
    if escape:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
    os._exit(0)


def main() -> None:
    options = parse([a for a in sys.argv[1:] if a not in {"-h", "--help"}])
    if {"-h", "--help"} & set(sys.argv[1:]):
        known = ["--model", "--kt-weight-path", "--served-model-name", "--context-length", "--api-key", "--tp-size"]
        hidden = options.hide_flags.split(",")
        print("\n".join(f"  {flag} VALUE" for flag in ["--host", "--port", *known] if flag not in hidden))
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(FakeEngine(options).serve())


if __name__ == "__main__":
    main()
