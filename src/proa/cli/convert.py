"""`proa convert`: the routed experts of a model in another format."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from proa.cli import console
from proa.cli.loading import ByteDisplay

if TYPE_CHECKING:
    from proa.convert.experts import Converted
    from proa.weights.progress import LoadStatus

__all__ = ["INTERRUPTED", "register", "run"]

INTERRUPTED = 130  # exit status of Ctrl-C, as shells have it

Method = Literal["AMXINT8", "AMXINT4", "BF16", "FP8"]


def register(app: typer.Typer) -> None:
    """Add `convert` to the commands."""
    app.command("convert", help=console.help_text(inspect.getdoc(convert) or ""))(convert)


def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory, in any format proa reads.")],
    method: Annotated[Method, typer.Option("--method", help="Format of the experts.", case_sensitive=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Directory to write to.")],
    experts: Annotated[
        Path | None,
        typer.Option("--kt-weight-path", metavar="GGUF", help="Read the experts from GGUF instead of MODEL."),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Default: every CPU there is.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything back and convert a sample again.")] = False,
) -> None:
    """Convert the routed experts of MODEL, to be served with `proa serve MODEL --kt-weight-path OUT`.

    AMXINT4 is int4 in groups of 32, AMXINT8 int8 in groups of 128, FP8 e4m3 in blocks of 128 x 128, BF16 unquantized.
    Experts that are in the format already are taken over bit for bit. OUT serves on any machine.

    A conversion that was stopped, by Ctrl-C, a full disk or a crash, goes on when the same command is run again.

    Examples:

        proa convert /models/Qwen3-30B-A3B --method AMXINT4 -o /models/Qwen3-30B-A3B-int4

        proa serve /models/Qwen3-30B-A3B --kt-weight-path /models/Qwen3-30B-A3B-int4
    """
    run(model, method, output, experts=experts, threads=threads, verify=verify)


def run(
    model: Path,
    method: str,
    output: Path,
    *,
    experts: Path | None = None,
    threads: int | None = None,
    verify: bool = False,
) -> None:
    """Convert, show progress on stderr and the errors of every layer on stdout.

    Raises:
        ProaError: see `proa.convert.experts.Conversion`.
        SystemExit: 130 after Ctrl-C.
    """
    from proa.convert.experts import Conversion  # here: native code, which other commands start without
    from proa.convert.verify import verify as verify_conversion

    display = ByteDisplay()

    def show(status: LoadStatus) -> None:
        display.update(status.stage, status.done_bytes, status.total_bytes)

    begin = time.monotonic()
    try:
        conversion = Conversion(model, method, output, experts=experts, num_threads=threads, progress=show)
        converted = conversion.run()
        display.close()
        _print_report(converted, output, time.monotonic() - begin)
        if verify:
            sampled = verify_conversion(conversion, show)
            display.close()
            console.out.print(f"verified: all checksums, and {sampled} linears converted again to the same bytes")
    except KeyboardInterrupt:
        display.close()
        console.error("interrupted; finished layers are kept, the same command goes on with the next")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        display.close()


def _print_report(converted: Converted, output: Path, seconds: float) -> None:
    manifest, origin = converted.manifest, converted.manifest.origin
    table = Table(box=None, header_style="bold")
    for column in ("layer", "relative error", "largest error", "GB"):
        table.add_column(column, justify="right")
    for layer, record in manifest.layers.items():
        size = f"{record.bytes / 1e9:.3f}"
        table.add_row(str(layer), f"{record.relative_error:.2e}", f"{record.max_error:.2e}", size)
    console.out.print(table)
    total = sum(record.bytes for record in manifest.layers.values())
    kept = f", {converted.kept} of them kept" if converted.kept else ""
    console.out.print(
        f"{origin.method} ({origin.format}) of {origin.source}: {len(manifest.layers)} layers{kept}, "
        f"{total / 1e9:.2f} GB in {output}, {seconds:.1f} s",
        soft_wrap=True,
    )
