"""What the API process costs per streamed token: its CPU time while many streams run, over the tokens they bring.

    python benchmarks/serving/api_cost.py [--streams 64] [--tokens 200] [--jsonl FILE]

The engine is scripted and gives one token per stream and step, a Kimi tokenizer of single bytes makes each token text.
The answer has reasoning, content and a tool call of a third each. Clients read raw bytes in a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/server"))
from fake_engine import ANSWER_SEED
from kimi_model import AB, CB, CE, END, SB, SE, TE, answer_ids, write_model
from server_process import KEY, ServerProcess

from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
MESSAGES = [{"role": "user", "content": "Go."}]
FUNCTION = {"name": "write", "description": "Writes a file.", "parameters": PARAMETERS}
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "Go.", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 2000,
        "tools": [{"name": "write", "input_schema": PARAMETERS}],
    },
}
# Steps of an engine that decodes fast; the more it sleeps, the more wake-ups a token costs.
STEP_SECONDS = 0.03
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def read_stream(port: int, path: str) -> int:
    """Bytes of one streamed answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "tiny", "stream": True, "seed": ANSWER_SEED, **BODIES[path]}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    received = 0
    while chunk := await reader.read(1 << 16):
        received += len(chunk)
    writer.close()
    return received


def read_all(port: int, path: str, streams: int) -> None:
    async def gather() -> None:
        sizes = await asyncio.gather(*(read_stream(port, path) for _ in range(streams)))
        assert min(sizes) > 1000, sizes

    asyncio.run(gather())


def measure(process: ServerProcess, path: str, streams: int, tokens: int) -> dict[str, object]:
    clients = multiprocessing.get_context("spawn").Process(target=read_all, args=(process.port, path, streams))
    before = cpu_seconds(process.process.pid)
    clients.start()
    clients.join()
    assert clients.exitcode == 0
    used = cpu_seconds(process.process.pid) - before
    return {
        "path": path,
        "streams": streams,
        "tokens": tokens,
        "ms_per_token": round(used / (streams * tokens) * 1e3, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jsonl", type=Path)
    options = parser.parse_args()
    third = options.tokens // 3
    text = f"{'why ' * (third // 4)}{TE}{'word ' * (third // 5)}{SB}{CB}functions.write:0{AB}" + json.dumps(
        {"path": "p" * (third - 40)}
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = write_model(directory / "model")
        ids = [*answer_ids(TiktokenTokenizer.load(model), text + CE + SE), END]
        (directory / "answers").write_text(json.dumps([ids]))
        engine = {
            "answers": str(directory / "answers"), "vocab_size": 512, "step_seconds": STEP_SECONDS,
            "max_running_requests": options.streams,
        }  # fmt: skip
        process = ServerProcess(directory, model, engine=engine, log_level="warning")
        try:
            process.wait_ready()
            results = [
                measure(process, path, options.streams, len(ids)) for _ in range(options.rounds) for path in BODIES
            ]
        finally:
            process.stop()
    for path in BODIES:
        times = [result["ms_per_token"] for result in results if result["path"] == path]
        print(
            f"{path:24} {options.streams} streams of {len(ids)} tokens: {min(times)} to {max(times)} ms of CPU a token"
        )
    if options.jsonl is not None:
        with options.jsonl.open("a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


if __name__ == "__main__":
    main()
