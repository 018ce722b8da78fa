"""`proa bench hybrid`: layers of a model's dimensions on GPU and CPU together, beside each alone."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from proa.cli import console
from proa.cli.bench_experts_spec import METHODS, parse_tokens
from proa.cli.bench_hybrid_spec import TRUNKS, make_hybrid_spec

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add `hybrid` to the commands of `app`."""
    app.command(help=console.help_text(inspect.getdoc(hybrid) or ""))(hybrid)


def hybrid(
    model: Annotated[str, typer.Option(help=f"Dimensions of {', '.join(TRUNKS)}.")] = "kimi-k2",
    method: Annotated[str, typer.Option(help=f"Weight format: {', '.join(METHODS)}.")] = "RAWINT4",
    layers: Annotated[int, typer.Option(help="Layers; fewer if memory is short.")] = 8,
    gpu_experts: Annotated[int, typer.Option(help="Experts of each layer on the GPU.")] = 0,
    deferred: Annotated[int, typer.Option(help="Experts of a token that come a layer late.")] = 0,
    skew: Annotated[float | None, typer.Option(help="Also experts that follow a routing of rank**-SKEW.")] = None,
    batches: Annotated[str, typer.Option(help="Sequences of a decode step.")] = "1",
    prompts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,8192,32768",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default one per physical core but one.")] = None,
    hand_over: Annotated[str, typer.Option(help="memory or host_function.")] = "memory",
    seconds: Annotated[float, typer.Option(help="Seconds per number.")] = 2.0,
    memory_gib: Annotated[float | None, typer.Option(help="For experts; default 3/4 of what is free.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object as well.")] = False,
) -> None:
    """Time decode and prompts of a stack of MoE layers with random weights, on GPU and CPU together and alone.

    Decode: one CUDA graph, routed experts on the CPU but for those on the GPU; beside it the CPU's and the GPU's work
    alone, and what handing over costs per layer. Prompts: one pass over the experts, all on the bus, all on the CPU
    (up to 2048 tokens) and as planned, beside the rate of plain pinned copies, the GPU's work alone, and the least time
    that the measured rates allow. Tokens per second are of the model's number of layers.

    Examples:

        proa bench hybrid --model kimi-k2 --layers 8

        proa bench hybrid --gpu-experts 38 --skew 0.8 --prompts 16384 --json
    """
    from proa.cli.bench_hybrid_core import HAND_OVERS, memory_for, run  # here: torch and the extension

    if hand_over not in HAND_OVERS:
        raise typer.BadParameter(f"expected one of {', '.join(HAND_OVERS)}, got '{hand_over}'")
    spec = make_hybrid_spec(
        model=model,
        method=method,
        layers=layers,
        gpu_experts=gpu_experts,
        skew=skew,
        deferred=deferred,
        batches=parse_tokens(batches),
        prompts=parse_tokens(prompts),
        threads=threads,
        seconds=seconds,
        available=memory_for(memory_gib),
    )
    out = console.err if json_output else console.out
    result = run(spec, hand_over, lambda line: out.print(line, markup=False, soft_wrap=True))
    if json_output:
        console.out.print(json.dumps(result), soft_wrap=True, markup=False)
