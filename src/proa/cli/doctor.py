"""`proa doctor`: what this machine is, how fast its memory reads, and which kernels would run."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from proa import __version__
from proa.cli import console

__all__ = ["Diagnosis", "diagnose", "register"]

# gate and up projection of one Kimi K2 expert.
EXPERT_OUT_FEATURES = 2048
EXPERT_IN_FEATURES = 7168


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything `proa doctor` found. Bytes are bytes, bandwidth is 10^9 bytes per second.

    kernels: by weight format every kernel, best first: name, chosen (for experts), reason. bf16_kernels, trunk_kernels:
    the one that `--expert-activations bf16` and the other linears choose, where it is another. self_test: by kernel
    name what is wrong, "" for nothing.
    """

    version: str
    cpu: dict[str, Any]
    ram_total_bytes: int
    ram_available_bytes: int
    read_gb_s: float | None
    read_one_core_gb_s: float | None
    kernels: dict[str, list[dict[str, Any]]]
    bf16_kernels: dict[str, str]
    trunk_kernels: dict[str, str]
    self_test: dict[str, str]
    advice: list[str]


def register(app: typer.Typer) -> None:
    """Add `doctor` to the commands."""
    app.command(help=console.help_text(inspect.getdoc(doctor) or ""))(doctor)


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth/--no-bandwidth", help="Measure how fast memory reads (a few seconds).")
    ] = True,
) -> None:
    """Show what this machine can do: instruction sets, cores, caches, NUMA, RAM, huge pages, memory bandwidth, kernels.

    Decoding reads every active weight once per token, so read bandwidth / bytes per token is the most tokens per second
    this machine can make. For each weight format the chosen kernel is shown, with the reason each other was rejected;
    the chosen ones are tested.

    Examples:

        proa doctor

        proa doctor --json | jq .read_gb_s

        PROA_FORCE_ISA=avx2 proa doctor    # as a machine without AVX-512
    """
    diagnosis = diagnose(measure=bandwidth)
    if json_output:
        console.out.print(json.dumps(asdict(diagnosis)), soft_wrap=True, markup=False)
    else:
        _print(diagnosis)


def diagnose(*, measure: bool) -> Diagnosis:
    """Look at the machine; `measure` also times memory reads.

    Raises:
        ConfigError: the C++ extension is missing or does not load, or PROA_FORCE_ISA asks for what this machine lacks.
    """
    # Here, so that `proa --help` needs no extension.
    from proa.layers.kernel_check import KernelUse, run_checks
    from proa.native import _C
    from proa.native.runtime import CpuRuntime, probe_mebibytes

    cpu: dict[str, Any] = {**_C.cpu_info()}
    memory = _meminfo(Path("/proc/meminfo").read_text())
    cores = list(cpu["physical_cpus"])
    probe_mib = probe_mebibytes(cpu["caches"]["l3"])
    shape = (EXPERT_OUT_FEATURES, EXPERT_IN_FEATURES)
    kernels = {name: [dict(row) for row in _C.kernel_report(name, *shape, "int8")] for name in _C.weight_formats()}
    uses = [KernelUse(name, *shape, kind) for name in kernels for kind in ("int8", "bf16", "trunk")]
    others: dict[str, dict[str, str]] = {"bf16": {}, "trunk": {}}
    for use in uses:
        if use.kernel != _chosen(kernels[use.format]):
            others[use.activations][use.format] = use.kernel
    with CpuRuntime() as runtime:
        checks = run_checks(runtime.pool, uses)
    return Diagnosis(
        version=__version__,
        cpu=cpu,
        ram_total_bytes=memory["MemTotal"],
        ram_available_bytes=memory["MemAvailable"],
        read_gb_s=_C.measure_read_bandwidth(cores, probe_mib) if measure else None,
        read_one_core_gb_s=_C.measure_read_bandwidth(cores[:1], probe_mib) if measure else None,
        kernels=kernels,
        bf16_kernels=others["bf16"],
        trunk_kernels=others["trunk"],
        self_test={check.kernel: check.fault for check in checks},
        advice=_advice(cpu),
    )


def _chosen(rows: list[dict[str, Any]]) -> str:
    return next((str(row["name"]) for row in rows if row["chosen"]), "")


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by name from the text of /proc/meminfo, whose unit is KiB."""
    fields = (line.split() for line in text.splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in fields if len(parts) == 3}


def _advice(cpu: dict[str, Any]) -> list[str]:
    advice = []
    if "avx2" not in cpu["isa"]:
        advice.append("no AVX2: the scalar reference kernels run, far slower than memory allows")
    if "never" in str(cpu["huge_pages"].get("transparent", "")):
        advice.append("transparent huge pages are off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    if len(cpu["cpus"]) > len(cpu["physical_cpus"]):
        advice.append("hyper-threads are left alone: proa starts one thread per physical core")
    return advice


def _print(diagnosis: Diagnosis) -> None:
    cpu = diagnosis.cpu
    caches = cpu["caches"]
    table = Table(show_header=False, title=f"proa {diagnosis.version}", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("CPU", f"{cpu['model_name']} ({cpu['vendor']})")
    table.add_row("Instruction sets", " ".join(cpu["isa"]))
    table.add_row("In use", cpu["isa_in_use"])
    table.add_row(
        "Cores", f"{len(cpu['physical_cpus'])} physical, {len(cpu['cpus'])} logical (allowed to this process)"
    )
    table.add_row("Caches", ", ".join(f"{name.upper()} {_size(caches[name])}" for name in ("l1d", "l2", "l3")))
    table.add_row("Threads", f"{len(cpu['physical_cpus'])} by default, on CPUs {_ranges(cpu['physical_cpus'])}")
    for node in cpu["numa_nodes"]:
        table.add_row(f"NUMA node {node['id']}", f"CPUs {_ranges(node['cpus'])}, {_size(node['mem_bytes'])}")
    table.add_row("RAM", f"{_size(diagnosis.ram_total_bytes)}, {_size(diagnosis.ram_available_bytes)} available")
    pages = cpu["huge_pages"]
    sizes = f"{_size(pages['page_bytes'])} each, {pages['reserved_free']} reserved ones free"
    table.add_row("Huge pages", f"transparent: {pages['transparent']}, {sizes}")
    if diagnosis.read_gb_s is not None:
        one = diagnosis.read_one_core_gb_s
        table.add_row("Read bandwidth", f"{diagnosis.read_gb_s:.1f} GB/s, one core {one:.1f} GB/s (measured)")
    console.out.print(table)

    console.out.print(_kernel_table(diagnosis))
    for line in diagnosis.advice:
        console.out.print(f"[yellow]note:[/] {line}")


def _ranges(numbers: list[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8; a dash for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "-"


def _kernel_table(diagnosis: Diagnosis) -> Table:
    shape = f"{EXPERT_OUT_FEATURES} x {EXPERT_IN_FEATURES}"
    kernels = Table(title=f"Kernels, for an expert of {shape}", title_justify="left")
    for header in ("format", "kernel", "", "why"):
        kernels.add_column(header)
    for name, rows in diagnosis.kernels.items():
        for index, row in enumerate(rows):
            mark, why = ("[green]chosen[/]" if row["chosen"] else "[dim]rejected[/]"), row["reason"]
            if fault := diagnosis.self_test.get(row["name"]):
                mark, why = "[red]broken[/]", f"fails its self-test: {fault}"
            elif diagnosis.bf16_kernels.get(name) == row["name"]:
                mark, why = "[green]bf16[/]", "chosen with --expert-activations bf16"
            elif diagnosis.trunk_kernels.get(name) == row["name"]:
                mark, why = "[green]trunk[/]", "chosen for attention and the head"
            kernels.add_row(name if index == 0 else "", row["name"], mark, why)
        kernels.add_section()
    return kernels


def _size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"
