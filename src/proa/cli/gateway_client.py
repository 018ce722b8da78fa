"""`proa gateway status|logs|load|unload`: what a person asks of a gateway that runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from proa.cli import console
from proa.cli.client import Endpoint, request_error
from proa.core import env
from proa.core.errors import UnavailableError

if TYPE_CHECKING:
    import httpx

__all__ = ["DEFAULT_URL", "register", "status_table"]

DEFAULT_URL = "http://127.0.0.1:8080"
_POLL_SECONDS = 0.5
_STYLES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "failed": "bold red", "stopped": "dim"}

Url = Annotated[str | None, typer.Option(help=f"Gateway; default PROA_BASE_URL, else {DEFAULT_URL}.")]
ApiKey = Annotated[str | None, typer.Option(help="Key of the gateway; better in PROA_API_KEY.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model, or an alias.")]


class _Gateway:
    """A gateway that runs. Errors are its own words."""

    def __init__(self, endpoint: Endpoint, client: httpx.Client) -> None:
        self._endpoint = endpoint
        self._client = client

    def get(self, path: str, **query: str) -> httpx.Response:
        return self._answer(lambda: self._client.get(self._endpoint.url(path), params=query, headers=self._headers))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._answer(lambda: self._client.post(self._endpoint.url(path), json=body, headers=self._headers))

    def statuses(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self.get("/models").json()["models"]
        return models

    @contextmanager
    def follow(self, path: str, **query: str) -> Iterator[Iterator[str]]:
        """The lines of a stream without end."""
        with self._client.stream("GET", self._endpoint.url(path), params=query, headers=self._headers) as answer:
            if answer.status_code != 200:
                answer.read()
                raise request_error(self._endpoint.root, answer.status_code, answer.text)
            yield answer.iter_lines()

    @property
    def _headers(self) -> dict[str, str]:
        return self._endpoint.headers()

    def _answer(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        answer = send()
        if answer.status_code != 200:
            raise request_error(self._endpoint.root, answer.status_code, answer.text)
        return answer


@contextmanager
def _connected(url: str | None, api_key: str | None) -> Iterator[_Gateway]:
    import httpx  # here: it is slow to import

    endpoint = Endpoint.parse(url or env.base_url() or DEFAULT_URL, api_key or env.api_key())
    # A model may load for many minutes.
    timeout = httpx.Timeout(None, connect=10.0)
    with httpx.Client(trust_env=False, timeout=timeout) as client:
        try:
            yield _Gateway(endpoint, client)
        except httpx.HTTPError as error:
            got = f"{type(error).__name__}: {error}"
            raise UnavailableError(endpoint.root, "a gateway", got, "start one with `proa gateway run`") from error


def status(
    url: Url = None,
    api_key: ApiKey = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show what changes.")] = False,
) -> None:
    """Show every model: what its engine does, how far loading is, requests, and why it failed."""
    with _connected(url, api_key) as gateway:
        if not watch:
            console.out.print(status_table(gateway.statuses()))
            return
        with Live(status_table(gateway.statuses()), console=console.out) as live:
            while True:
                time.sleep(_POLL_SECONDS)
                live.update(status_table(gateway.statuses()))


def status_table(models: list[dict[str, Any]]) -> Table:
    """One row per entry of GET /models."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("MODEL", "BACKEND", "STATE", "SINCE", "RUNNING", "WAITING", ""):
        table.add_column(column, justify="right" if column in {"SINCE", "RUNNING", "WAITING"} else "left")
    for model in models:
        names = model["name"] + "".join(f", {alias}" for alias in model["aliases"])
        state = f"[{_STYLES[model['state']]}]{model['state']}[/]"
        counts = (str(model["running"]), str(model["waiting"]))
        table.add_row(escape(names), model["backend"], state, duration(model["since"]), *counts, _detail(model))
    return table


def _detail(model: dict[str, Any]) -> Any:
    if (progress := model["progress"]) is not None:
        if progress["fraction"] is None:
            return escape(progress["text"])
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(100, 100 * progress["fraction"], width=20), escape(progress["text"]))
        return row
    retry = f"again in {duration(model['retry_after'])}" if model["retry_after"] else ""
    return escape(", ".join(filter(None, (model["reason"], retry))))


def duration(seconds: float) -> str:
    """Such as 45s, 3m20s, 2h05m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02}m"


def logs(
    model: Model,
    url: Url = None,
    api_key: ApiKey = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and print what comes.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="Lines to begin with.")] = 200,
) -> None:
    """Print what the engine of a model wrote."""
    with _connected(url, api_key) as gateway:
        if follow:
            with gateway.follow(f"/logs/{model}", follow="1", lines=str(lines)) as coming:
                for line in coming:
                    _print(line)
        else:
            for line in gateway.get(f"/logs/{model}", lines=str(lines)).text.splitlines():
                _print(line)


def _print(line: str) -> None:
    console.out.print(line, markup=False, soft_wrap=True)


def load(model: Model, url: Url = None, api_key: ApiKey = None) -> None:
    """Start the engine of a model and wait until it takes requests. Ctrl-C leaves the load going."""
    with _connected(url, api_key) as gateway:
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                gateway.post("/models/load", {"model": model})
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        started = time.monotonic()
        asking.start()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, console=console.err, transient=True) as bar:
            task = bar.add_task(escape(model), total=None)
            while asking.is_alive():
                asking.join(_POLL_SECONDS)
                for entry in gateway.statuses() if asking.is_alive() else ():
                    if model in {entry["name"], *entry["aliases"]} and (progress := entry["progress"]) is not None:
                        part = progress["fraction"]
                        text = escape(f"{model}: {progress['text']}")
                        bar.update(task, description=text, total=None if part is None else 1.0, completed=part or 0.0)
        if failures:
            raise failures[0]
        console.out.print(f"{model} is ready after {duration(time.monotonic() - started)}", markup=False)


def unload(
    model: Model,
    url: Url = None,
    api_key: ApiKey = None,
    now: Annotated[bool, typer.Option("--now", help="Cut running requests off instead of waiting for them.")] = False,
) -> None:
    """Stop the engine of a model, after the requests it has, and wait until it is gone."""
    with _connected(url, api_key) as gateway:
        gateway.post("/models/unload", {"model": model, "now": now})
        console.out.print(f"{model} is stopped", markup=False)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, logs, load, unload):
        app.command(command.__name__)(command)
