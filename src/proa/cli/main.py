"""`proa`: the commands, one file each, and what an error looks like."""

from __future__ import annotations

import sys

import typer

from proa import __version__
from proa.cli import bench, chat, console, convert, doctor, gateway, plan, profile, serve, top
from proa.core.errors import ProaError

__all__ = ["app", "main"]

app = typer.Typer(
    name="proa",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves mixture-of-experts language models on one workstation.\n\n"
    "First steps:\n\n"
    "    proa doctor                    # what this machine can do\n\n"
    "    proa chat demo                 # talk to a small demo model, built once\n\n"
    "    proa serve /path/to/model      # OpenAI endpoint on http://127.0.0.1:8000/v1\n\n"
    "    proa bench serve --url URL     # how fast an endpoint answers",
)


def _show_version(value: bool) -> None:
    if value:
        console.out.print(f"proa {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    del version


serve.register(app)
chat.register(app)
doctor.register(app)
plan.register(app)
convert.register(app)
profile.register(app)
top.register(app)
app.add_typer(bench.app, name="bench")
app.add_typer(gateway.app, name="gateway")


def main() -> None:
    """Entry point of the `proa` script. Exit status: 0 done, else that of `console.exit_status`."""
    try:
        app()
    except ProaError as failure:
        console.error(str(failure))
        sys.exit(console.exit_status(failure))


if __name__ == "__main__":
    main()
