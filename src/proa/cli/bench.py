"""`proa bench`: its commands, and `serve`, which loads an OpenAI endpoint with random prompts."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proa.cli import bench_experts, bench_hybrid, console
from proa.cli.bench_client import Load, run_load
from proa.cli.bench_report import Report, print_report
from proa.cli.client import Endpoint
from proa.core import env
from proa.core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure a running server, or this machine's experts.")


def serve(
    url: Annotated[str | None, typer.Option(help="Server; default PROA_BASE_URL, else http://127.0.0.1:8000.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default the server's first.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    random_input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens per request.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Lengths are uniform from ratio * length to length; 1 = all equal.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight; default no limit.")] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second, Poisson arrivals; inf = all at once.")
    ] = math.inf,
    seed: Annotated[int, typer.Option(help="Seed of lengths, tokens and arrivals.")] = 0,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Token ids are drawn below this; default what the server says, else 1000.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")] = 1,
    flush_cache: Annotated[bool, typer.Option("--flush-cache", help="Empty the prefix cache before the run.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; better in PROA_API_KEY.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    output_file: Annotated[Path | None, typer.Option(help="Append the JSON object as a line to this file.")] = None,
) -> None:
    """Send random prompts to an OpenAI endpoint and print throughput and latencies.

    Prompts are random token ids sent to /v1/completions and answers are generated with ignore_eos, so all lengths are
    exact. TPOT is (E2E - TTFT) / (tokens - 1); prefill speed at concurrency 1 is input length / TTFT.

    Examples:

        proa bench serve --random-input-len 1024 --random-output-len 1     # prefill

        proa bench serve --random-input-len 10 --random-output-len 512     # decode

        proa bench serve --num-prompts 99 --request-rate 2 --max-concurrency 8
    """
    import httpx  # here: it is slow to import, and `proa serve` does without

    if not request_rate > 0:
        raise ConfigError("--request-rate", "a number above 0, or inf", request_rate)
    _check_writable(output_file)
    key = api_key or env.api_key()
    endpoint = Endpoint.parse(url or env.base_url() or "http://127.0.0.1:8000", key)
    with httpx.Client(trust_env=False, timeout=30.0) as client:
        name = model or endpoint.first_model(client)
        vocab = vocab_size or _vocab_size(client, endpoint)
        if flush_cache:
            client.post(endpoint.url("/flush_cache"), headers=endpoint.headers()).raise_for_status()
    load = Load(
        num_prompts=num_prompts,
        input_len=random_input_len,
        output_len=random_output_len,
        range_ratio=random_range_ratio,
        max_concurrency=max_concurrency,
        request_rate=request_rate,
        seed=seed,
        vocab_size=vocab,
        warmup=warmup,
    )
    results, duration_s = asyncio.run(run_load(endpoint, name, load))
    report = Report.of(results, duration_s, load, model=name, url=endpoint.root)
    line = json.dumps(report.as_dict())
    if output_file is not None:
        with output_file.open("a") as file:
            file.write(line + "\n")
    if json_output:
        console.out.print(line, soft_wrap=True, markup=False)
    else:
        print_report(report)
    failures = [result.error for result in results if result.error]
    if failures:
        console.error(f"{len(failures)} of {len(results)} requests failed; the first: {failures[0]}")
        raise typer.Exit(1)


app.command("serve", help=console.help_text(inspect.getdoc(serve) or ""))(serve)
bench_experts.register(app)
bench_hybrid.register(app)


def _check_writable(path: Path | None) -> None:
    """Before the run, not after it."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise ConfigError("--output-file", "a file that can be written", error) from error


def _vocab_size(client: httpx.Client, endpoint: Endpoint) -> int:
    """Vocabulary size from /get_server_info; 1000 where the server does not tell (every real vocabulary is larger)."""
    import httpx  # here: it is slow to import, and `proa serve` does without

    try:
        info = client.get(endpoint.url("/get_server_info"), headers=endpoint.headers()).json()
        return int(info["vocab_size"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return 1000
