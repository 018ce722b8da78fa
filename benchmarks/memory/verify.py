"""`proa plan MODEL --verify` without typer and rich: a line of JSON as each stage is reached, and one at the end.

python benchmarks/memory/verify.py MODEL [--vram GIB] [--context N] [--concurrency N] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch

from proa.native import _C
from proa.plan.estimate import Estimate
from proa.plan.hardware import Overrides, probe
from proa.plan.memory_plan import Wanted, plan_memory
from proa.plan.model_sizes import read_sizes
from proa.plan.trial import Mark, run_trial
from proa.plan.verify import Pace, compare_memory, compare_speed

MIB = 2**20


def smi_mib() -> int | None:
    """What nvidia-smi has as used, of the first GPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def resident_parts() -> dict[str, int]:
    """Of this process, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) // 1024 for name, _, value in (s.partition(":") for s in lines) if "Rss" in name
    }


def describe_machine() -> dict[str, Any]:
    cpu = _C.cpu_info()
    found = {name: cpu[name] for name in ("vendor", "model_name", "isa_in_use")}
    found["physical_cpus"] = len(cpu["physical_cpus"])
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found | {"torch": torch.__version__}


def in_mib(rows: dict[str, int]) -> dict[str, int]:
    return {name: round(size / MIB) for name, size in rows.items()}


def pace(found: Pace) -> dict[str, Any]:
    estimate: Estimate = found.estimate
    expected = [round(rate, 1) for rate in (estimate.range.low, estimate.range.high, estimate.bound)]
    return {"what": found.name, "tokens": found.tokens, "context": found.context, "low_high_bound": expected} | {
        "found": round(found.actual, 1),
        "is_expected": found.is_expected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--vram", type=float)
    parser.add_argument("--context", type=int)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--bandwidth", type=float)
    parser.add_argument("--settings", type=json.loads, default={})
    given = parser.parse_args()
    sizes = read_sizes(given.model)
    overrides = Overrides(vram=given.vram, bandwidth=given.bandwidth)
    machine = probe(overrides, rates=given.bandwidth is None, is_share=True)
    config = Wanted(given.context, given.concurrency).config_for(sizes.info.max_position_embeddings)
    plan = plan_memory(sizes, machine, msgspec.structs.replace(config, **given.settings))
    line: dict[str, Any] = {"what": "planned and found, MiB", "machine": describe_machine()}
    line |= {
        "settings": given.settings,
        "vram_gib": given.vram,
        "context": plan.context,
        "concurrency": plan.concurrency,
        "chunk": plan.chunk,
    }
    line |= {"gpu_experts": plan.gpu_experts, "streams": plan.streams, "refusal": plan.refusal}
    rates = {"pcie": machine.pcie, "vram": machine.vram, "gpu_tflops": machine.gpu_tflops}
    line |= {"read_gb_s": round(machine.read_gb_s, 1)} | {
        name: [round(rate.low, 1), round(rate.high, 1)] for name, rate in rates.items()
    }
    line |= {"planned": {"gpu": in_mib(plan.vram), "ram": in_mib(plan.ram)}}
    print(json.dumps(line), flush=True)
    if not plan.fits:
        raise SystemExit(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here: measuring the bandwidth took memory too
    stages = []
    started = perf_counter()

    def marked(stage: str, mark: Mark) -> None:
        found = {"stage": stage, "s": round(perf_counter() - started, 1), **in_mib(asdict(mark)), **resident_parts()}
        if torch.cuda.is_available():
            found |= in_mib({"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()})
            found["smi"] = smi_mib()
        stages.append(found)
        print(json.dumps(found), flush=True)

    vram = None if not given.vram else machine.vram_bytes
    trial = run_trial(given.model, plan, vram_bytes=vram, marked=marked)
    rows = [
        {"device": row.device, "name": row.name, **in_mib({"planned": row.predicted, "found": row.actual})}
        | {"off": round(row.deviation, 4)}
        for row in compare_memory(sizes, plan, trial)
    ]
    line |= {"stages": stages, "rows": rows}
    line["speed"] = [pace(found) for found in compare_speed(sizes, plan, machine, trial)]
    for row in [*rows, *line["speed"]]:
        print(json.dumps(row), flush=True)
    if given.results is not None:
        with given.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
