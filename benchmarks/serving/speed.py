"""Speed of a whole server: time to start, prefill, decode alone and batched, the engine's own time per step.

    python benchmarks/serving/speed.py                      the demo model
    python benchmarks/serving/speed.py --model DIR --label qwen3-8l-int4

Prints a table and appends one JSON line, with the machine's fingerprint, to benchmarks/results/speed.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from prometheus import metrics

from proa.cli.bench_client import Load, run_load
from proa.cli.bench_report import Report
from proa.cli.client import Endpoint
from proa.cli.doctor import diagnose
from proa.cli.local_server import local_server

RESULTS = Path(__file__).parents[1] / "results" / "speed.jsonl"
# name -> (prompt tokens, answer tokens, requests, concurrency)
LOADS = {
    "prefill 512": (512, 1, 4, 1),
    "prefill 2048": (2048, 1, 2, 1),
    "decode 1": (16, 128, 2, 1),
    "decode 4": (16, 128, 4, 4),
    "decode 8": (16, 128, 8, 8),
}


def fingerprint() -> dict[str, Any]:
    """The machine and the commit, as every result has to name them."""
    machine = diagnose(measure=True)
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "csrc", "src"], capture_output=True, text=True).stdout
    return {
        "commit": commit + ("+changes" if changed else ""),
        "cpu": machine.cpu["model_name"],
        "isa": machine.cpu["isa_in_use"],
        "cores": len(machine.cpu["physical_cpus"]),
        "read_gb_s": round(machine.read_gb_s or 0.0, 1),
        "ram_gb": machine.ram_total_bytes >> 30,
    }


class StepSampler:
    """Reads the engine's time outside the model, of its last step, every 0.1 s while a load runs."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._samples = self._pool.submit(self._read)

    def _read(self) -> list[float]:
        samples = []
        with httpx.Client(trust_env=False) as client:
            while not self._done.wait(0.1):
                values = metrics(client, self._endpoint)
                samples.append((values["proa:schedule_seconds"] + values["proa:sample_seconds"]) * 1e3)
        return samples

    def median_ms(self) -> float:
        """Stop reading; the median of schedule + sample."""
        self._done.set()
        self._pool.shutdown()
        return statistics.median(self._samples.result())


def measure(model: str, flags: list[str], loads: Collection[str] = tuple(LOADS)) -> dict[str, Any]:
    """Start a server for `model` and run these loads."""
    start = time.perf_counter()
    with local_server(model, flags=flags) as server:
        result: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 2)}
        with httpx.Client(trust_env=False) as client:
            name = server.endpoint.first_model(client)
            info = client.get(server.endpoint.url("/get_server_info")).json()
        result |= {"weight_bytes": info["weight_bytes"], "engine": info["engine_info"]}
        for index, (label, (prompt, answer, count, concurrency)) in enumerate(LOADS.items()):
            if label not in loads:
                continue
            load = Load(
                num_prompts=count, input_len=prompt, output_len=answer, max_concurrency=concurrency,
                seed=100 + index, vocab_size=info["vocab_size"],
            )  # fmt: skip
            sampler = StepSampler(server.endpoint)
            answers, duration_s = asyncio.run(run_load(server.endpoint, name, load))
            overhead_ms = sampler.median_ms()
            errors = [answer.error for answer in answers if answer.error]
            if errors:
                raise SystemExit(f"{label}: {errors[0]}")
            report = Report.of(answers, duration_s, load, model=name, url="")
            result[label] = {
                "prefill_tok_s": round(prompt / report.ttft_ms.median * 1e3, 1),
                "decode_tok_s": round(concurrency * 1e3 / report.tpot_ms.median, 1) if answer > 1 else None,
                "ttft_ms": asdict(report.ttft_ms),
                "itl_ms": asdict(report.itl_ms),
                "overhead_ms": round(overhead_ms, 3),
            }
    return result


def main() -> int:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--label", help="name of the run; default the model")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="*", help="further flags of `proa serve`, after --")
    arguments = parser.parse_args()
    record = {"label": arguments.label or arguments.model, "machine": fingerprint()}
    record |= measure(arguments.model, ["--max-running-requests", "8", *arguments.flags])
    print(f"{record['label']}: ready in {record['ready_s']} s, {record['weight_bytes'] / 1e9:.2f} GB of weights")
    for label in LOADS:
        row = record[label]
        speed = row["decode_tok_s"] or row["prefill_tok_s"]
        print(f"{label:14} {speed:9.1f} tok/s   schedule + sample {row['overhead_ms']:.2f} ms per step")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
