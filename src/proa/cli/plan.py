"""`proa plan`: whether a model fits, what goes where, how fast it will be, and what to change when it does not fit."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from proa.cli import console
from proa.cli.flags import DEMO
from proa.cli.loading import ByteDisplay
from proa.convert.demo_path import demo_model_path
from proa.core.errors import CheckpointError

if TYPE_CHECKING:
    from proa.plan.estimate import Estimate
    from proa.plan.hardware import Machine
    from proa.plan.memory_plan import MemoryPlan
    from proa.plan.model_sizes import ModelSizes
    from proa.plan.verify import Comparison, Pace

__all__ = ["register"]

_GIB = 2**30
_MOST_DEVIATION = 0.05


def register(app: typer.Typer) -> None:
    """Add `plan` to the commands."""
    app.command("plan", help=console.help_text(inspect.getdoc(plan) or ""))(plan)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory with config.json, or demo.")],
    vram: Annotated[float | None, typer.Option("--vram", help="Free GPU memory in GiB; 0 for no GPU.")] = None,
    ram: Annotated[float | None, typer.Option("--ram", help="Available RAM in GiB.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="Read bandwidth of the RAM in GB/s. Default: measured.")
    ] = None,
    pcie: Annotated[
        float | None, typer.Option("--pcie", help="Copies from RAM to the GPU in GB/s. Default: 22 to 55.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a request. Default: the model's, at most 32768.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests at a time.")] = 1,
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option("--kv-cache-dtype", help="Number format of the KV cache.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu"], typer.Option("--device", help="cpu: nothing goes to the GPU.")] = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Load the model as planned, run it, and compare what it takes.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a model fits a machine and how, before it is loaded or even downloaded.

    config.json is enough; model.safetensors.index.json beside it says which weights are quantized, complete weights
    give exact sizes. The machine is this one, or the one that the flags describe. Estimates are intervals. When the
    model does not fit, up to three ways to make it fit are shown, and the exit status is 1. With --verify it is 1 too
    where GPU memory or RAM of a run are more than 5 % off the plan, or a speed is not in its interval.

    Examples:

        proa plan /models/Kimi-K2-Thinking

        proa plan ./Kimi-K2-Thinking --ram 768 --vram 96 --bandwidth 500 --context 131072 --concurrency 4

        proa plan demo --json | jq .fits
    """
    # Here, so that `proa --help` needs neither torch nor the extension.
    from proa.plan.advice import PLAN_FLAGS, cheapest_ways
    from proa.plan.estimate import estimate_decode, estimate_prefill
    from proa.plan.hardware import Overrides, probe
    from proa.plan.memory_plan import Wanted, plan_memory
    from proa.plan.model_sizes import read_sizes

    overrides = Overrides(vram, ram, bandwidth, pcie)
    wanted = Wanted(context, concurrency, kv_cache_dtype, use_gpu=device != "cpu")
    sizes = read_sizes(_directory(model))
    config = wanted.config_for(sizes.info.max_position_embeddings)
    machine = probe(overrides, is_share=verify)
    memory = plan_memory(sizes, machine, config)
    ways = [] if memory.fits else [way.text(config, PLAN_FLAGS) for way in cheapest_ways(sizes, machine, config)]
    decode, prefill = estimate_decode(sizes, memory, machine), estimate_prefill(sizes, memory, machine)
    compared, paces = ([], []) if not (verify and memory.fits) else _verify(_directory(model), sizes, memory, machine)
    if json_output:
        found = _as_json(model, sizes, machine, memory, decode, prefill, ways)
        found["verified"] = [{**asdict(row), "deviation": row.deviation} for row in compared]
        found["timed"] = [{**asdict(pace), "is_expected": pace.is_expected} for pace in paces]
        console.out.print(json.dumps(found), soft_wrap=True, markup=False)
    else:
        _print_memory(model, sizes, machine, memory)
        _print_speed(memory, decode, prefill)
        _print_verdict(model, memory, ways)
        if compared:
            _print_comparison(compared, paces)
    is_off = any(row.name == "total" and abs(row.deviation) > _MOST_DEVIATION for row in compared)
    if not memory.fits or is_off or not all(pace.is_expected for pace in paces):
        raise typer.Exit(1)


def _verify(path: Path, sizes: ModelSizes, memory: MemoryPlan, machine: Machine) -> tuple[list[Comparison], list[Pace]]:
    from proa.plan.trial import run_trial  # here, as in `plan`
    from proa.plan.verify import compare_memory, compare_speed

    display = ByteDisplay()
    vram = machine.vram_bytes if "vram" in machine.told else None
    try:
        trial = run_trial(
            path, memory, vram_bytes=vram, report=lambda done, total: display.update("loading", done, total)
        )
    finally:
        display.close()
    return compare_memory(sizes, memory, trial), compare_speed(sizes, memory, machine, trial)


def _directory(model: str) -> Path:
    if model != DEMO:
        return Path(model).expanduser()
    if not demo_model_path().is_dir():
        raise CheckpointError("MODEL", "the demo model to be built", "none yet", "proa chat demo builds it")
    return demo_model_path()


def _as_json(
    model: str,
    sizes: ModelSizes,
    machine: Machine,
    memory: MemoryPlan,
    decode: Estimate,
    prefill: Estimate,
    ways: list[str],
) -> dict[str, Any]:
    experts = sizes.info.experts
    return {
        "model": model,
        "family": sizes.info.family,
        "sizes_from": sizes.source,
        "fits": memory.fits,
        "refusal": memory.refusal,
        "weight_bytes": {"trunk": sizes.trunk_bytes, "routed_experts": sizes.expert_bytes},
        "experts": {**asdict(experts), "bytes_each": sizes.bytes_per_expert},
        "machine": asdict(machine),
        "plan": {name: value for name, value in asdict(memory).items() if name not in ("config", "refusal")},
        "flags": memory.flags if memory.fits else [],
        "decode": asdict(decode),
        "prefill": asdict(prefill),
        "ways_to_fit": ways,
    }


def _print_memory(model: str, sizes: ModelSizes, machine: Machine, memory: MemoryPlan) -> None:
    console.out.print(f"{model}: {sizes.info.family}, sizes from {sizes.source}", soft_wrap=True, markup=False)
    table = Table()
    table.add_column("GiB", style="bold")
    for device in ("RAM", "GPU"):
        table.add_column(device, justify="right")
    for name in dict.fromkeys([*memory.vram, *memory.ram]):
        if memory.ram.get(name) or memory.vram.get(name):
            table.add_row(name, *(_gib(part.get(name)) for part in (memory.ram, memory.vram)))
    table.add_section()
    table.add_row("needed", *(_gib(sum(part.values()) or None) for part in (memory.ram, memory.vram)))
    table.add_row("there is", _gib(machine.ram_bytes), _gib(machine.vram_bytes or None))
    console.out.print(table)
    experts = sizes.info.experts
    size = f"{sizes.bytes_per_expert / 1e6:.2f} MB"
    tokens = f"{memory.concurrency} x {memory.context} tokens"
    lines = [
        f"{experts.layers} x {experts.experts} routed experts of {size}, {experts.top_k} of them for a token",
        f"KV cache: {memory.kv_token_bytes / 1024:.1f} KiB per token in {memory.kv_dtype}, {tokens}",
    ]
    if memory.uses_gpu:
        streams = "stream through the GPU" if memory.streams else "run where they lie"
        there = f"{memory.gpu_experts} of {experts.layers * experts.experts}"
        lines.append(f"experts on the GPU: {there}; for prompts the others {streams}")
    for line in lines:
        console.out.print(line, soft_wrap=True)


def _print_speed(memory: MemoryPlan, decode: Estimate, prefill: Estimate) -> None:
    table = Table(title="Tokens per second", title_justify="left")
    for header in ("", "expected", "bound", "per step or prompt"):
        table.add_column(header, justify="left" if header == "" else "right")
    rows = {
        f"decode, {memory.concurrency} at a time": decode,
        f"prefill, {memory.context} tokens": prefill,
    }
    for name, estimate in rows.items():
        amounts = {"RAM": estimate.ram_bytes, "GPU memory": estimate.vram_bytes, "PCIe": estimate.pcie_bytes}
        read = ", ".join(f"{amount / 1e9:.2f} GB {where}" for where, amount in amounts.items() if amount)
        flops = f", {estimate.flops / 1e12:.0f} TFLOP" if estimate.flops >= 1e12 else ""
        expected = f"{_rate(estimate.range.low)} to {_rate(estimate.range.high)}"
        table.add_row(name, expected, _rate(estimate.bound), read + flops)
    console.out.print(table)


def _print_verdict(model: str, memory: MemoryPlan, ways: list[str]) -> None:
    if memory.fits:
        console.out.print("[green]It fits.[/]")
        console.out.print(f"proa serve {model} {' '.join(memory.flags)}", soft_wrap=True, markup=False)
        return
    console.out.print(f"[red]It does not fit:[/] {escape(memory.refusal)}", soft_wrap=True)
    console.out.print("Any of these makes it fit, the cheapest first:" if ways else "No single change makes it fit.")
    for number, way in enumerate(ways, 1):
        console.out.print(f"  {number}. {way}", soft_wrap=True, markup=False)


def _print_comparison(rows: list[Comparison], paces: list[Pace]) -> None:
    table = Table(title="GiB, planned and found in a run", title_justify="left")
    for header in ("", "", "planned", "found", "off by"):
        table.add_column(header, justify="left" if header == "" else "right")
    for row in rows:
        style = "bold" if row.name == "total" else None
        cells = (row.device, row.name, _gib(row.predicted), _gib(row.actual), f"{row.deviation:+.1%}")
        table.add_row(*cells, style=style)
    console.out.print(table)
    table = Table(title="Tokens per second, expected and found in a run", title_justify="left")
    for header in ("", "expected", "found"):
        table.add_column(header, justify="left" if header == "" else "right")
    for pace in paces:
        name = f"{pace.name}, {pace.tokens} tokens" + (f" after {pace.context}" if pace.name == "decode" else "")
        expected = f"{_rate(pace.estimate.range.low)} to {_rate(pace.estimate.range.high)}"
        table.add_row(name, expected, _rate(pace.actual), style=None if pace.is_expected else "red")
    console.out.print(table)


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / _GIB:.2f}"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
