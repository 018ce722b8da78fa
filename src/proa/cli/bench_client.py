"""The load of `proa bench serve`: which requests, when, and what was seen of each."""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proa.cli.client import Endpoint, parse_event, request_error
from proa.core.errors import ProaError

if TYPE_CHECKING:
    import httpx

__all__ = ["Load", "Request", "Result", "make_requests", "run_load"]


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. Lengths in tokens, rate in requests per second."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 1.0
    max_concurrency: int | None = None
    request_rate: float = math.inf
    seed: int = 0
    vocab_size: int = 1000
    warmup: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One random prompt."""

    token_ids: list[int]
    output_len: int


@dataclass(slots=True)
class Result:
    """What the client saw of one request. Times in seconds; `gaps_s` are the times between arrivals of text."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""


def make_requests(load: Load, seed: int, count: int) -> list[Request]:
    """`count` requests drawn from `seed`: the same seed gives the same requests."""
    rng = random.Random(seed)

    def length(longest: int) -> int:
        return rng.randint(max(1, math.ceil(longest * load.range_ratio)), longest)

    return [
        Request([rng.randrange(load.vocab_size) for _ in range(length(load.input_len))], length(load.output_len))
        for _ in range(count)
    ]


async def run_load(endpoint: Endpoint, model: str, load: Load) -> tuple[list[Result], float]:
    """Send the load; results in the order of the requests, and the duration in seconds without the warm-up."""
    import httpx  # here: it is slow to import, and `proa serve` does without

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.max_concurrency or 100)
    timeout = httpx.Timeout(None, connect=10.0)
    async with httpx.AsyncClient(trust_env=False, timeout=timeout, limits=limits) as client:
        # Prompts of the warm-up must not be those of the run: they would be found in the prefix cache.
        for request in make_requests(load, ~load.seed, load.warmup):
            await _send(client, endpoint, model, request)
        requests = make_requests(load, load.seed, load.num_prompts)
        arrivals = random.Random(load.seed + 1)
        gate = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()

        async def limited(request: Request) -> Result:
            async with gate:
                return await _send(client, endpoint, model, request)

        start = time.perf_counter()
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(limited(request)))
            if math.isfinite(load.request_rate):
                await asyncio.sleep(arrivals.expovariate(load.request_rate))
        results = await asyncio.gather(*tasks)
        return list(results), time.perf_counter() - start


async def _send(client: httpx.AsyncClient, endpoint: Endpoint, model: str, request: Request) -> Result:
    import httpx  # here: it is slow to import, and `proa serve` does without

    payload = {
        "model": model,
        "prompt": request.token_ids,
        "max_tokens": request.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = Result(input_tokens=len(request.token_ids))
    start = last = time.perf_counter()
    url = endpoint.url("/v1/completions")
    try:
        async with client.stream("POST", url, json=payload, headers=endpoint.headers()) as response:
            if response.status_code != 200:
                raise request_error(url, response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                event = parse_event(line)
                if event is None:
                    continue
                if usage := event.get("usage"):
                    result.output_tokens = usage["completion_tokens"]
                    result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                if not event.get("choices"):
                    continue
                now = time.perf_counter()
                if result.ttft_s == 0.0:
                    result.ttft_s = now - start
                else:
                    result.gaps_s.append(now - last)
                last = now
        result.latency_s = last - start
        if result.output_tokens != request.output_len:
            result.error = f"expected {request.output_len} tokens, got {result.output_tokens}"
    except (httpx.HTTPError, ProaError, KeyError) as error:
        result.error = str(error) or type(error).__name__
    return result
