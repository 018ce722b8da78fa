"""The measuring of `proa bench hybrid`. Needs torch with CUDA, triton and the extension, no terminal library:

    python -m proa.cli.bench_hybrid_core --model kimi-k2 --layers 8 --json

Weights and routing are random, so that experts are used evenly; the trunk is plain torch products of the model's
dimensions. Decode is one CUDA graph of all layers; a prompt is one pass over the experts, on the bus and on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from proa import __version__
from proa.cli.bench_experts_spec import METHODS, parse_tokens
from proa.cli.bench_hybrid_decode import measure_decode
from proa.cli.bench_hybrid_prefill import measure_prefill
from proa.cli.bench_hybrid_setup import HybridStack
from proa.cli.bench_hybrid_spec import TRUNKS, HybridSpec, make_hybrid_spec
from proa.cli.bench_hybrid_updates import measure_updates
from proa.core.errors import ProaError
from proa.engine.memory import available_bytes
from proa.native import _C

__all__ = ["HAND_OVERS", "main", "memory_for", "report", "run"]

HAND_OVERS = ("memory", "host_function")
MEMORY_SHARE = 0.75
STEPS_PER_SECOND = 400  # of a phase that experts follow, for a second of other numbers


def memory_for(gibibytes: float | None) -> int:
    """Bytes for experts: what was asked for, or most of what is free."""
    return int(available_bytes() * MEMORY_SHARE) if gibibytes is None else int(gibibytes * 2**30)


def run(spec: HybridSpec, hand_over: str, write: Callable[[str], None], **stack_options: Any) -> dict[str, Any]:
    """Builds the layers, measures decode and the prompts, and gives the JSON object."""
    stack = HybridStack(spec, hand_over=hand_over, progress=write, **stack_options)
    try:
        stack.move_to_gpu()
        results: dict[str, Any] = {
            "build": stack.timings,
            "decode": [measure_decode(stack, tokens, write) for tokens in spec.batches],
        }
        if spec.skew is not None and spec.gpu_experts:
            results["updates"] = measure_updates(
                stack, write, skew=spec.skew, steps=max(120, int(STEPS_PER_SECOND * spec.experts.seconds))
            )
        results["prefill"] = [measure_prefill(stack, tokens, write) for tokens in spec.prompts]
        if stack.rates is not None:
            results["rates"] = asdict(stack.rates)
        return report(stack, hand_over, results)
    finally:
        stack.close()


def report(stack: HybridStack, hand_over: str, results: dict[str, Any]) -> dict[str, Any]:
    """{version, machine, model, results}."""
    import torch

    spec, info = stack.spec, _C.cpu_info()
    gpu = torch.cuda.get_device_name() if stack.device.type == "cuda" else "none"
    return {
        "version": __version__,
        "machine": {
            **{key: info[key] for key in ("vendor", "model_name", "isa_in_use", "caches")},
            "physical_cpus": len(info["physical_cpus"]),
            "numa_nodes": len(info["numa_nodes"]),
            "gpu": gpu,
            "cuda_driver": stack.driver.version,
            "torch": torch.__version__,
            "load_average": round(os.getloadavg()[0], 2),
        },
        "model": {
            "method": spec.experts.method.name,
            "layers": spec.layers,
            "model_layers": spec.trunk.layers,
            "experts": spec.experts.dims.experts,
            "top_k": spec.experts.dims.top_k,
            "gpu_experts": spec.gpu_experts,
            "deferred": spec.deferred,
        },
        "threads": stack.runtime.num_threads,
        "hand_over": hand_over,
        **results,
    }


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line without typer. Exit status 2 for wrong flags and machines without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kimi-k2", help=" | ".join(TRUNKS))
    parser.add_argument("--method", default="RAWINT4", help=" | ".join(METHODS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--gpu-experts", type=int, default=0)
    parser.add_argument("--deferred", type=int, default=0, help="experts of a token that come a layer late")
    parser.add_argument("--skew", type=float, help="also experts that follow a routing of p(rank) ~ rank**-skew")
    parser.add_argument("--batches", default="1", help="sequences of a decode step")
    parser.add_argument("--prompts", default="8192,32768")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--hand-over", choices=HAND_OVERS, default="memory")
    parser.add_argument("--memory-gib", type=float, help="for experts; default three quarters of what is free")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        spec = make_hybrid_spec(
            model=given.model,
            method=given.method,
            layers=given.layers,
            gpu_experts=given.gpu_experts,
            skew=given.skew,
            deferred=given.deferred,
            batches=parse_tokens(given.batches),
            prompts=parse_tokens(given.prompts),
            threads=given.threads,
            seconds=given.seconds,
            available=memory_for(given.memory_gib),
        )
        result = run(spec, given.hand_over, _write)
    except ProaError as error:
        _write(f"error: {error}")
        return 2
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
