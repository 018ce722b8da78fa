"""Random requests with random aborts against a real server, then: is anything left behind?

    python benchmarks/serving/soak.py --minutes 10

Fails (status 1) when, after the last request, KV tokens are in use after a flush, a process or file descriptor is there
that was not before, or the server does not answer as it did at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus import metric

from proa.cli.client import Endpoint, parse_event
from proa.cli.local_server import local_server
from proa.core.errors import ProaError

ABORT_SHARE = 0.4
SETTLE_S = 15.0
SHARED_PREFIX = [1000 + i for i in range(96)]
PROBE = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}


@dataclass(frozen=True)
class Footprint:
    """What the server holds when it is idle."""

    processes: int
    descriptors: int
    resident_mb: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        resident = sum(process.memory_info().rss for process in tree)
        return cls(len(tree), sum(process.num_fds() for process in tree), resident >> 20)


def wait_idle(endpoint: Endpoint) -> None:
    """Until nothing runs or waits; statistics arrive once a second from an idle engine."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        if metric(endpoint, "sglang:num_running_reqs") == 0 and metric(endpoint, "sglang:num_queue_reqs") == 0:
            return
        time.sleep(0.2)
    raise SystemExit(f"sequences still run {SETTLE_S:.0f} s after the last request")


def used_after_flush(endpoint: Endpoint) -> float:
    """KV tokens in use once the prefix cache is empty: the leak, in tokens."""
    httpx.post(endpoint.url("/flush_cache"), trust_env=False).raise_for_status()
    deadline = time.monotonic() + SETTLE_S
    used = metric(endpoint, "proa:kv_tokens_used")
    while used and time.monotonic() < deadline:
        time.sleep(0.2)
        used = metric(endpoint, "proa:kv_tokens_used")
    return used


def probe(endpoint: Endpoint) -> str:
    """A greedy answer: the same at start and end."""
    response = httpx.post(endpoint.url("/v1/completions"), json=PROBE, timeout=60.0, trust_env=False)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def random_request(rng: random.Random) -> dict[str, Any]:
    """Any mix of short and long, shared and own prompts, greedy and sampled, one choice and several."""
    own = [rng.randrange(1000, 40000) for _ in range(rng.choice((1, 7, 40, 300, 900)))]
    return {
        "prompt": (SHARED_PREFIX if rng.random() < 0.5 else []) + own,
        "max_tokens": rng.choice((1, 4, 16, 64)),
        "temperature": rng.choice((0.0, 0.7, 1.3)),
        "top_p": rng.choice((1.0, 0.9)),
        "n": rng.choice((1, 1, 1, 3)),
        "ignore_eos": rng.random() < 0.5,
        "frequency_penalty": rng.choice((0.0, 0.5)),
        "logprobs": rng.choice((None, None, 2)),
        "stream": True,
    }


async def one_request(client: httpx.AsyncClient, endpoint: Endpoint, rng: random.Random) -> str:
    """Send a request; leave it after a random number of events when it is one of those to abort. Returns its fate."""
    leave_after = rng.randrange(12) if rng.random() < ABORT_SHARE else None
    events = 0
    try:
        async with client.stream("POST", endpoint.url("/v1/completions"), json=random_request(rng)) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            if leave_after == 0:
                return "left"
            async for line in response.aiter_lines():
                events += parse_event(line) is not None
                if leave_after is not None and events >= leave_after:
                    return "left"
    except ProaError as error:
        return f"error event: {error}"
    except httpx.HTTPError as error:
        return type(error).__name__
    return "finished"


async def load(endpoint: Endpoint, seconds: float, concurrency: int, seed: int) -> Counter[str]:
    """`concurrency` clients that send one random request after another for `seconds`."""
    fates: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def client_loop(index: int) -> None:
        rng = random.Random(f"{seed}/{index}")
        async with httpx.AsyncClient(trust_env=False, timeout=120.0) as client:
            while time.monotonic() < end:
                fates[await one_request(client, endpoint, rng)] += 1

    await asyncio.gather(*(client_loop(index) for index in range(concurrency)))
    return fates


def main() -> int:
    """Run the soak, print one JSON object, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", type=Path, help="append the JSON object to this file")
    arguments = parser.parse_args()
    # A KV cache of a few requests: eviction and waiting are part of the soak.
    flags = ["--max-total-tokens", "8192", "--context-length", "4096", "--max-running-requests", "6"]
    with local_server(arguments.model, flags=flags) as server:
        endpoint = server.endpoint
        answer = probe(endpoint)
        asyncio.run(load(endpoint, min(5.0, arguments.minutes * 10), arguments.concurrency, ~arguments.seed))  # warm-up
        wait_idle(endpoint)
        before = Footprint.of(server.pid)
        start = time.monotonic()
        fates = asyncio.run(load(endpoint, arguments.minutes * 60, arguments.concurrency, arguments.seed))
        seconds = time.monotonic() - start
        wait_idle(endpoint)
        leaked = used_after_flush(endpoint)
        time.sleep(1.0)  # connections of the last clients are closed by then
        after = Footprint.of(server.pid)
        same = probe(endpoint) == answer
    failures = [fate for fate in fates if fate not in {"finished", "left"}]
    good = not (leaked or failures or not same or fates["left"] == 0 or fates["finished"] == 0)
    good = good and after.processes == before.processes and after.descriptors <= before.descriptors
    report = {
        "ok": good, "seconds": round(seconds, 1), "requests": dict(fates), "leaked_kv_tokens": leaked,
        "same_answer": same, "before": vars(before), "after": vars(after),
    }  # fmt: skip
    print(json.dumps(report))
    if arguments.output:
        with arguments.output.open("a") as file:
            file.write(json.dumps(report) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
