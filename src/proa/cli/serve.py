"""`proa serve`: the OpenAI endpoint of one model. Its options are made from the table in `proa.cli.flags`."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from proa.cli import console
from proa.cli.fit import ways_to_fit
from proa.cli.flag import Flag, default_text
from proa.cli.flag_report import FlagReport
from proa.cli.flags import DEMO, FLAGS, by_owner, check_values
from proa.cli.loading import ByteDisplay, EngineDisplay
from proa.convert.demo_path import demo_model_path
from proa.core import env
from proa.core.errors import CheckpointError, ConfigError
from proa.core.logging import configure
from proa.engine.config import EngineConfig
from proa.server.config import ServerConfig

__all__ = ["compose", "register", "run"]

_log = logging.getLogger("proa.cli")

# -P: with -m alone Python would import from the working directory, which may be a model's.
_ENGINE_COMMAND = [sys.executable, "-P", "-m", "proa.engine"]
_PANELS = {"server": "Endpoint", "engine": "Engine"}
_HELP = """Serve a model directory as an OpenAI endpoint.

MODEL is a Hugging Face checkpoint directory (config.json, *.safetensors, a tokenizer), or demo: a small model of
real language that is built once. Weights are used in the format they are stored in; nothing is downloaded and no code
from the directory is run. SIGTERM or Ctrl-C lets running streams finish; a second one ends at once.

Examples:

    proa serve demo

    proa serve /models/Qwen3-30B-A3B --port 9000

    proa serve /models/Kimi-K2 --context-length 65536 --max-running-requests 4

    curl http://127.0.0.1:8000/v1/models
"""


def register(app: typer.Typer) -> None:
    """Add `serve` to the commands."""

    def command(**values: Any) -> None:
        run(values["model"], {flag.name: values[_parameter_name(flag)] for flag in FLAGS})

    model = inspect.Parameter(
        "model",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, or demo.")],
    )
    parameters = [model, *map(_parameter, FLAGS)]
    # typer reads a command's options from its signature; this one has a row of the table per option.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command("serve", help=console.help_text(_HELP))(command)


def _parameter_name(flag: Flag) -> str:
    return flag.name.removeprefix("--").replace("-", "_")


def _parameter(flag: Flag) -> inspect.Parameter:
    kind: Any = Literal[flag.choices] if flag.choices else flag.kind
    numbers: dict[str, Any] = (
        {"parser": _number(flag), "metavar": f"{flag.kind.__name__}|auto"} if flag.may_be_auto else {}
    )
    option = typer.Option(
        flag.name,
        help=f"{flag.doc} [default: {default_text(flag)}]".replace("[", "\\["),
        rich_help_panel=_PANELS[flag.owner],
        show_default=False,
        **numbers,
    )
    return inspect.Parameter(
        _parameter_name(flag), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _number(flag: Flag) -> Callable[[str], float | None]:
    def parse(text: str) -> float | None:
        try:
            return flag.number(text)
        except ValueError:
            raise typer.BadParameter(f"expected a number ({flag.kind.__name__}) or auto, got {text!r}") from None

    return parse


def run(model: str, values: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> None:
    """Serve until SIGTERM. `values` maps flag names to values; None is the default. `notes`: see `FlagReport`.

    Raises:
        ConfigError: a value is wrong, or the address is taken.
        CheckpointError: the directory holds no checkpoint.
        SystemExit: the engine could not start; its message has been printed.
    """
    from proa.server.launch import serve as serve_api  # here, so that the other commands start without a web server

    level = values.get("--log-level") or env.log_level()
    configure(level, process="api")
    server, engine = compose(model, {**values, "--log-level": level})
    result = serve_api(
        server,
        _ENGINE_COMMAND,
        engine.to_json(),
        on_status=EngineDisplay(ByteDisplay()),
        on_ready=FlagReport(values, notes).show if level in {"debug", "info"} else None,
        on_listening=lambda url: _log.info("%s at %s/v1", server.model_name, url),
    )
    if result.exit_code:
        console.error(result.message)
        if result.is_shortage:
            _print_ways(engine)
        sys.exit(result.exit_code)


def _print_ways(config: EngineConfig) -> None:
    for number, way in enumerate(ways_to_fit(config), 1):
        if number == 1:
            console.err.print("What makes it fit, the cheapest first (proa plan tells more):")
        console.err.print(f"  {number}. {way}", soft_wrap=True, markup=False)


def compose(model: str, values: Mapping[str, Any]) -> tuple[ServerConfig, EngineConfig]:
    """The two configurations of a server. Builds the demo model if it is asked for and not there.

    Raises:
        ConfigError: a value out of range.
        CheckpointError: no such model directory.
    """
    check_values(values)
    # The addresses are made by the API process for each engine it starts.
    given = EngineConfig(model_path=model, to_engine="", from_engine="", **by_owner(values, "engine"))
    _check_engine_config(given, values)  # before anything is built or started
    path = _model_directory(model)
    settings = by_owner(values, "server")
    settings.setdefault("api_key", env.api_key())
    if model == DEMO:
        settings.setdefault("served_model_name", DEMO)
    elif "served_model_name" not in settings:
        settings["aliases"] = (model,)  # SGLang's clients send the path as it was given
    experts = None if given.expert_path is None else Path(given.expert_path)
    return ServerConfig(model_path=path, expert_path=experts, **settings), msgspec.structs.replace(
        given, model_path=str(path)
    )


def _check_engine_config(config: EngineConfig, values: Mapping[str, Any]) -> None:
    """Raise ConfigError that names the flag, where the config names its field."""
    try:
        EngineConfig.from_json(config.to_json())
    except ConfigError as error:
        for flag in FLAGS:
            if flag.owner == "engine" and f"`$.{flag.field}`" in str(error):
                found = re.search(r"Expected (.*?)(, got .*?)? - at ", str(error))
                expected = found[1] if found else "a known value"
                raise ConfigError(flag.name, expected, values[flag.name], "see --help") from error
        raise


def _model_directory(model: str) -> Path:
    if model == DEMO:
        return _demo_model()
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        what = "a directory without one" if path.is_dir() else "a file" if path.exists() else "nothing there"
        fix = "name a Hugging Face checkpoint directory, or demo"
        raise CheckpointError("MODEL", f"a directory with config.json at {path}", what, fix)
    return path


def _demo_model() -> Path:
    path = demo_model_path()
    if path.is_dir():
        return path
    from proa.convert.demo_model import ensure_demo_model  # here: it needs numpy, which is slow to import

    display = ByteDisplay()
    try:
        return ensure_demo_model(
            progress=lambda s: display.update(f"demo model: {s.stage}", s.done_bytes, s.total_bytes)
        )
    finally:
        display.close()
