"""`proa bench experts` over several dimensions, formats and thread counts, one line per cell appended to a file.

    python benchmarks/kernels/experts.py [--dims 7168x2048x32 2048x768x128] [--methods RAWINT4 FP8 BF16]
                                         [--tokens 1 4 16 64 512] [--threads 16 15] [--peer torch] [--seconds 1]
                                         [--jsonl benchmarks/results/experts.jsonl]

Top-8. A line has the commit, the machine's name, the layer, and what `proa bench experts --json` has in `results`.
PROA_FORCE_ISA selects the kernels as everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

from proa.cli.bench_experts_core import ExpertBench, measure
from proa.cli.bench_experts_spec import PEERS, make_spec


def lines(report: dict[str, Any], commit: str) -> list[dict[str, Any]]:
    """One flat object per cell of a report."""
    layer = report["layer"]
    head = {
        "machine": report["machine"]["model_name"],
        "commit": commit,
        "dims": f"{layer['hidden']}x{layer['intermediate']}x{layer['experts']}",
        "method": layer["method"],
        "threads": report["threads"],
        "load_average": report["machine"]["load_average"],
    }
    return [{**head, **cell} for cell in report["results"]]


def main() -> None:
    """Print a table per layer, and append lines when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="+", default=["7168x2048x32", "2048x768x128"], help="HIDDENxINTERxEXPERTS")
    parser.add_argument("--methods", "--formats", nargs="+", default=["RAWINT4", "FP8", "BF16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", nargs="+", type=int, default=[None], help="default: one per core")
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell and side")
    parser.add_argument("--jsonl", type=Path, help="append results to this file")
    args = parser.parse_args()
    describe = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    for threads, dims, method in itertools.product(args.threads, args.dims, args.methods):
        hidden, intermediate, experts = (int(part) for part in dims.split("x"))
        spec = make_spec(
            method=method,
            tokens=args.tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            threads=threads,
            peer=args.peer,
            seconds=args.seconds,
        )
        with ExpertBench(spec) as bench:
            report = bench.report(measure(bench, lambda line: print(line, flush=True)))
        if args.jsonl:
            with args.jsonl.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines(report, describe.stdout.strip()))


if __name__ == "__main__":
    main()
