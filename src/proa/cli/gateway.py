"""`proa gateway`: engines on demand behind one endpoint. Commands that talk to one that runs: `gateway_client`."""

from __future__ import annotations

import inspect
import logging
import re
import shlex
from dataclasses import replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from proa.cli import console, gateway_client
from proa.core import env
from proa.core.errors import ConfigError
from proa.core.logging import configure
from proa.gateway.http_settings import HttpSettings

if TYPE_CHECKING:
    from proa.gateway.config import ModelConfig

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Start engines when they are asked for, and pass requests on to them: docs/gateway.md."
)
_log = logging.getLogger("proa.cli")

_DEFAULT_CONFIG = Path("gateway.yaml")
_DEFAULTS = HttpSettings()
# Stands for the port and the key of a run, which are chosen at its start.
_SAMPLE_PORT = 40000

Config = Annotated[Path, typer.Option(help="gateway.yaml, or a config.json with a ktransformers block.")]


def init(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Model directory, or demo.")] = "demo",
    config: Annotated[Path, typer.Option(help="File to write.")] = _DEFAULT_CONFIG,
) -> None:
    """Write a gateway.yaml for a model, to be edited."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-").lower() or "model"
    text = resources.files("proa.cli").joinpath("gateway.template.yaml").read_text(encoding="utf-8")
    # JSON texts are YAML texts: whatever stands in a path stays a path.
    path = model if model == "demo" else msgspec.json.encode(str(Path(model).expanduser().resolve())).decode()
    try:
        with config.open("x", encoding="utf-8") as file:
            file.write(Template(text).safe_substitute(NAME=name, PATH=path))
    except FileExistsError as error:
        raise ConfigError(
            str(config), "a new file", "one that is there", "edit it, or name another --config"
        ) from error
    except OSError as error:
        raise ConfigError(str(config), "a file that can be written", error, "name another --config") from error
    console.out.print(f"{config} runs {name}. Next: proa gateway run, then ask for it:", markup=False)
    console.out.print(f"proa chat {gateway_client.DEFAULT_URL}", markup=False)


def check(
    config: Config = _DEFAULT_CONFIG,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Read a configuration, and show its models and the commands that would run them. Nothing is started."""
    from proa.gateway.config_file import read_config  # here: jsonschema is slow to import

    found = read_config(config)
    rows = [_described(model) for model in found.models.values()]
    if json_output:
        console.out.print(msgspec.json.encode({"models": rows}).decode(), soft_wrap=True, markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("MODEL", "BACKEND", "COMMAND"):
        table.add_column(column, overflow="fold")
    for row in rows:
        names = "\n".join([row["name"], *row["aliases"]])
        table.add_row(escape(names), row["backend"], escape(shlex.join(row["command"])))
    console.out.print(table)
    console.out.print(f"{len(rows)} models, listening on {found.host}:{found.port}", markup=False)


def _described(model: ModelConfig) -> dict[str, Any]:
    from proa.gateway.backends import BACKENDS
    from proa.gateway.invocation import invoke

    made = invoke(BACKENDS[model.backend], model, model.port or _SAMPLE_PORT)
    secrets = {value.split()[-1] for value in made.headers.values()}
    command = [word if not secrets & {word} else "KEY" for word in made.command]
    return {"name": model.name, "aliases": [*model.aliases], "backend": model.backend, "command": command}


def run(
    config: Config = _DEFAULT_CONFIG,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default the file's. 0.0.0.0 opens it to the network.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; default the file's.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key every request has to carry; better in PROA_API_KEY.")] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds that running requests may go on after SIGTERM.")
    ] = _DEFAULTS.drain_timeout,
    progress_interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between comments on a stream whose model loads.")
    ] = _DEFAULTS.progress_interval,
    response_header_timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds an engine may take to begin its answer; default no limit.")
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, max=1 << 31, help="Longest request body.")
    ] = _DEFAULTS.max_body_bytes,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="Default PROA_LOG_LEVEL, else info.")
    ] = None,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C; requests that run may finish, a second signal ends at once.

    Engines are started by the first request for their model. No engine outlives the gateway, however that ends.
    """
    from proa.gateway.config_file import read_config
    from proa.gateway.launch import run as run_gateway  # here, so that the other commands start without a web server

    configure(log_level or env.log_level(), process="gateway")
    found = read_config(config)
    settings = HttpSettings(
        api_key=api_key or env.api_key(),
        max_body_bytes=max_body_bytes,
        max_total_body_bytes=max(4 * max_body_bytes, _DEFAULTS.max_total_body_bytes),
        progress_interval=progress_interval,
        response_header_timeout=response_header_timeout,
        drain_timeout=drain_timeout,
    )
    run_gateway(
        replace(found, host=host or found.host, port=port or found.port),
        settings,
        config_path=config,
        on_listening=lambda url: _log.info("models of %s at %s/v1, what they do at %s/", config, url, url),
    )


for _command in (init, check, run):
    app.command(_command.__name__, help=console.help_text(inspect.getdoc(_command) or ""))(_command)
gateway_client.register(app)
