"""`proa profile`: which experts a model uses, recorded from a running server or read from a file."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from proa.cli import console
from proa.cli.client import Endpoint, request_error
from proa.core import env
from proa.core.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    import httpx

    from proa.moe.stats import ExpertStats

__all__ = ["register"]

SHARES = (0.05, 0.1, 0.2, 0.5)  # of the experts, whose part of the tokens is shown
_ROUTE = "{}_expert_distribution_record"


def register(app: typer.Typer) -> None:
    """Add `profile` to the commands."""
    app.command("profile", help=console.help_text(inspect.getdoc(profile) or ""))(profile)


def profile(
    source: Annotated[str, typer.Argument(metavar="URL|FILE", help="A running server, or a .pt or .json of counts.")],
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: one a line, text or JSON with prompt or messages.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Prompts in flight.")] = 4,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write counts for --expert-location.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; better in PROA_API_KEY.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show how unevenly a model uses its routed experts, and write the counts that placement goes by.

    With a URL the server records while it answers the prompts of a file; without --prompts what it has recorded since
    /start_expert_distribution_record is taken. The table has, for each layer, the part of its tokens that its most used
    experts get: what as many experts on the GPU would serve.

    Examples:

        proa profile http://127.0.0.1:8000 --prompts prompts.txt -o counts.json

        proa profile counts.pt -o counts.json     # of SGLang's recorder

        proa serve MODEL --expert-location counts.json
    """
    if output is not None:
        _check_output(output)
    stats = _from_file(Path(source)) if Path(source).suffix in (".pt", ".json") else None
    if stats is None:
        endpoint = Endpoint.parse(source, api_key or env.api_key())
        stats = _from_server(endpoint, prompts, max_tokens=max_tokens, concurrency=concurrency)
    elif prompts is not None:
        raise ConfigError("--prompts", "a server to send them to", f"the file {source}")
    if not stats.counts.sum():
        raise ConfigError("profile", "tokens that were routed", "none", "send requests while it records")
    if output is not None:
        try:
            stats.save(output)
        except OSError as error:
            raise ConfigError("--output", "a file that can be written", error) from error
    _show(stats, json_output=json_output)


def _show(stats: ExpertStats, *, json_output: bool) -> None:
    rows = [[_share(layer, share) for share in SHARES] for layer in stats.counts]
    total = [_share(stats.counts.reshape(-1), share) for share in SHARES]
    if json_output:
        layers, experts = stats.counts.shape
        result = {"layers": layers, "experts": experts, "tokens": int(stats.counts.sum()), "shares": SHARES}
        console.out.print(json.dumps({**result, "by_layer": rows, "all_layers": total}), soft_wrap=True, markup=False)
        return
    table = Table(title="part of the tokens that the most used experts get")
    for name in ("layer", *(f"{share:.0%} of experts" for share in SHARES)):
        table.add_column(name, justify="right")
    for layer, row in enumerate(rows):
        table.add_row(str(layer), *(f"{part:.1%}" for part in row))
    table.add_section()
    table.add_row("all", *(f"{part:.1%}" for part in total))
    console.out.print(table)


def _check_output(path: Path) -> None:
    """Before an hour of prompts, not behind it."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        raise ConfigError("--output", "a file that can be written", f"'{path}'", "name one where that is allowed")


def _share(counts: Any, share: float) -> float:
    """Of the tokens `counts` that the `share` most used experts get."""
    ordered = sorted((float(count) for count in counts), reverse=True)
    return sum(ordered[: round(share * len(ordered))]) / max(1.0, sum(ordered))


def _from_file(path: Path) -> ExpertStats:
    from proa.moe.stats import ExpertStats  # here: torch is slow to import

    return ExpertStats.load(path)


def _from_server(endpoint: Endpoint, prompts: Path | None, *, max_tokens: int, concurrency: int) -> ExpertStats:
    import httpx
    import numpy as np

    from proa.moe.stats import ExpertStats

    requests = None if prompts is None else _requests(prompts, max_tokens)
    with httpx.Client(trust_env=False, timeout=httpx.Timeout(30.0, read=None), headers=endpoint.headers()) as client:
        model = endpoint.first_model(client)
        if requests is not None:
            _post(client, endpoint.url("/" + _ROUTE.format("start")), {})
            try:
                _send_all(client, endpoint, model, requests, concurrency)
            finally:
                _post(client, endpoint.url("/" + _ROUTE.format("stop")), {})
        answer = _post(client, endpoint.url("/" + _ROUTE.format("dump")), {})
    return ExpertStats(np.asarray(answer["logical_count"], dtype=np.float64))


def _requests(path: Path, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(route, body) of each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", "a readable text file", error) from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        value: Any = line
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError("--prompts", "JSON or text in each line", f"line {number}: {error}") from error
        if isinstance(value, dict) and "messages" in value:
            requests.append(("/v1/chat/completions", {"messages": value["messages"], "max_tokens": max_tokens}))
        elif isinstance(value, dict) and "prompt" not in value:
            raise ConfigError("--prompts", "prompt or messages in each object", f"line {number} without")
        else:
            prompt = value["prompt"] if isinstance(value, dict) else value
            requests.append(("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}))
    if not requests:
        raise ConfigError("--prompts", "at least one prompt", f"none in {path}")
    return requests


def _send_all(
    client: httpx.Client, endpoint: Endpoint, model: str, requests: list[tuple[str, dict[str, Any]]], concurrency: int
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def send(request: tuple[str, dict[str, Any]]) -> None:
        route, body = request
        _post(client, endpoint.url(route), {"model": model, **body})

    with ThreadPoolExecutor(concurrency) as pool:
        for done in [pool.submit(send, request) for request in requests]:
            done.result()


def _post(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    import httpx

    try:
        response = client.post(url, json=body)
    except httpx.HTTPError as error:
        raise UnavailableError(url, "a server", f"{type(error).__name__}: {error}", "start one") from error
    if response.status_code != 200:
        raise request_error(url, response.status_code, response.text)
    answer: dict[str, Any] = response.json()
    return answer
