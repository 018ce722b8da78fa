"""`proa bench experts`: how close one layer of routed experts comes to what this machine's memory and cores can do."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from proa.cli import console
from proa.cli.bench_experts_spec import METHODS, MODELS, PEERS, make_spec, parse_tokens

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add `experts` to the commands of `app`."""
    app.command(help=console.help_text(inspect.getdoc(experts) or ""))(experts)


def experts(
    method: Annotated[str, typer.Option(help=f"Weight format: {', '.join(METHODS)}.")] = "RAWINT4",
    model: Annotated[str | None, typer.Option(help=f"Dimensions of {', '.join(MODELS)}.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Intermediate size of an expert.")] = None,
    num_experts: Annotated[
        int | None, typer.Option("--experts", help="Experts; default the model's, else 32. Fewer if memory is short.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token; default the model's, else 8.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens per call, one row each.")] = "1,2,4,8,16,64,256,1024",
    threads: Annotated[int | None, typer.Option(help="Threads; default one per physical core.")] = None,
    peer: Annotated[
        str | None, typer.Option(help=f"Time it in turn with ours, on as many threads: {', '.join(PEERS)}.")
    ] = None,
    activations: Annotated[
        str, typer.Option("--expert-activations", help="int8, or bf16 for kernels that do not round them to int8.")
    ] = "int8",
    seconds: Annotated[float, typer.Option(help="Seconds per row and side.")] = 1.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Time one layer of routed experts with random weights and random routing.

    GB/s are the checkpoint bytes of the distinct experts touched, beside the read bandwidth measured in turn on the
    same cores. TFLOP/s stand beside the fastest of torch's int8, bf16 and f32 matrix products (1024 x 4096 x 4096),
    measured in turn too: a library's rate, so more than 100 % is possible. All numbers are medians.

    The peer torch runs the experts one by one in bf16; kt-kernel runs the same format, where it is installed.

    Examples:

        proa bench experts --model kimi-k2 --experts 32

        proa bench experts --model qwen3-30b --method BF16 --tokens 1,16 --peer torch

        proa bench experts --hidden 4096 --intermediate 1024 --experts 64 --top-k 4 --json
    """
    spec = make_spec(
        method=method,
        tokens=parse_tokens(tokens),
        model=model,
        hidden=hidden,
        intermediate=intermediate,
        experts=num_experts,
        top_k=top_k,
        threads=threads,
        peer=peer,
        seconds=seconds,
        activations=activations,
    )
    from proa.cli.bench_experts_core import ExpertBench, measure  # here: numpy and the extension, for this command only

    table = console.err if json_output else console.out
    with console.err.status("") as status:
        bench = ExpertBench(spec, status.update)
        status.update("measuring")
        with bench:
            cells = measure(bench, lambda line: table.print(line, markup=False, soft_wrap=True))
    if json_output:
        console.out.print(json.dumps(bench.report(cells)), soft_wrap=True, markup=False)
