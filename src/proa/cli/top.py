"""`proa top`: what a running server is doing, live."""

from __future__ import annotations

import inspect
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from proa.cli import console
from proa.cli.client import Endpoint
from proa.cli.server_metrics import ServerMetrics, fetch_metrics
from proa.core import env
from proa.core.errors import ProaError

if TYPE_CHECKING:
    import httpx

__all__ = ["register", "render"]

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 24
_BESIDE_BAR = 28  # columns of the names and the frame
_TIMEOUT_S = 5.0


def register(app: typer.Typer) -> None:
    """Add `top` to the commands."""
    app.command("top", help=console.help_text(inspect.getdoc(top) or ""))(top)


def top(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The server; PROA_BASE_URL, else http://127.0.0.1:8000.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="A JSON object for each look, one a line.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; better in PROA_API_KEY.")] = None,
) -> None:
    """Show requests, tokens per second, KV cache and experts of a running server, until Ctrl-C.

    Rates are over the last second in which there was work. Experts on the GPU: for each MoE layer the share of decoded
    slots that found theirs there. CPU experts: what they read beside the RAM's bandwidth, which the engine measures at
    start for models of 8 GiB and more.

    Examples:

        proa top

        proa top http://workstation:8000 --interval 5

        proa top --once --json | jq .tokens_per_s
    """
    import httpx  # here: it is slow to import

    endpoint = Endpoint.parse(url or env.base_url() or "http://127.0.0.1:8000", api_key or env.api_key())
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        metrics = fetch_metrics(client, endpoint)
        if json_output:
            _print_json(metrics)
        elif once:
            console.out.print(render(metrics))
        if once:
            return
        try:
            _watch(client, endpoint, metrics, interval, json_output=json_output)
        except KeyboardInterrupt:
            return


def _watch(
    client: httpx.Client, endpoint: Endpoint, metrics: ServerMetrics, interval: float, *, json_output: bool
) -> None:
    if json_output:
        while True:
            time.sleep(interval)
            _print_json(fetch_metrics(client, endpoint))
    with Live(render(metrics), console=console.out, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            note = ""
            try:
                metrics = fetch_metrics(client, endpoint)
            except ProaError as error:  # it may come back, and a proxy answers meanwhile
                note = str(error)
            live.update(render(metrics, note), refresh=True)


def _print_json(metrics: ServerMetrics) -> None:
    console.out.print(json.dumps(asdict(metrics)), soft_wrap=True, markup=False)


def render(metrics: ServerMetrics, note: str = "") -> RenderableType:
    """`note`: why these are not the newest. It stands first, as a low terminal shows the upper rows."""
    state = "[green]ready[/]" if metrics.is_ready else "[yellow]engine not ready[/]"
    state = "[red]no answer; as it was:[/]" if note else state
    table = Table(title=f"{escape(metrics.model)}  {state}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(metrics, max(4, min(_BAR_WIDTH, console.out.width - _BESIDE_BAR))):
        table.add_row(name, text)
    return Group(f"[yellow]{escape(note)}[/]", table) if note else table


def _rows(m: ServerMetrics, bar_width: int) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{m.running} running, {m.waiting} waiting"),
        ("decode", f"{m.tokens_per_s:.1f} tokens/s, last step {m.step_s * 1e3:.1f} ms"),
    ]
    if m.prefill_tokens:
        progress = f"{m.prefill_share:.0%} of the layers, {m.prefill_tokens} tokens"
        rows.append(("prefill", f"{_bar(m.prefill_share, bar_width)} {progress}"))
    used = m.kv_used / m.kv_capacity if m.kv_capacity else 0.0
    cache = f"{used:.0%} of {m.kv_capacity} tokens, {m.prefix_hit_rate:.0%} from prefixes"
    rows.append(("KV cache", f"{_bar(used, bar_width)} {cache}"))
    of_ram = f", {m.bandwidth_share:.0%} of the RAM's {m.ram_gb_s:.0f}" if m.ram_gb_s else ""
    rows.append(("CPU experts", f"{m.expert_gb_s:.1f} GB/s{of_ram}"))
    if m.gpu_hits:
        mean = sum(m.gpu_hits) / len(m.gpu_hits)
        layers = "".join(_BARS[min(len(_BARS) - 1, int(hit * len(_BARS)))] for hit in m.gpu_hits)
        spread = f"{mean:.0%} of slots, {min(m.gpu_hits):.0%} to {max(m.gpu_hits):.0%} by layer"
        rows.append(("experts on the GPU", f"{layers}  {spread}"))
    if m.stream_gb_s:
        rows.append(("streamed experts", f"{m.stream_gb_s:.1f} GB/s"))
    counts = {
        "experts moved": m.moved_experts,
        "slots a layer late": m.deferred_experts,
        "rejected": m.rejected,
        "aborted": m.aborted,
        "out of memory": m.out_of_memory,
        "engine restarts": m.restarts,
    }
    if some := ", ".join(f"{count} {name}" for name, count in counts.items() if count):
        rows.append(("since start", some))
    return rows


def _bar(share: float, width: int) -> str:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "━" * filled + "[dim]" + "━" * (width - filled) + "[/]"
