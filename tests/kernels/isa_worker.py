"""Runs kernel cases under the ISA of PROA_FORCE_ISA: a JSON case per line on stdin, the result's digest on stdout."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
from tests.kernels import layer_cases
from tests.kernels.test_experts import Batch, Experts, forward
from tests.kernels.weight_cases import WeightCase

from proa.native import _C


def digest_linear(pool: _C.ThreadPool, format: str, rows: int, columns: int, tokens: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    case = WeightCase.make(format, rows, columns, rng)
    weight = _C.PackedWeight.pack(pool, case)
    out = np.empty((tokens, rows), np.float32)
    _C.linear(pool, rng.standard_normal((tokens, columns), np.float32), weight, out)
    return hashlib.sha256(out.tobytes() + weight.dequantize().tobytes()).hexdigest()


def digest_experts(pool: _C.ThreadPool, format: str, tokens: int, seed: int) -> str:
    return hashlib.sha256(
        forward(Experts.make(format, seed).load(pool), Batch.make(tokens, seed)).tobytes()
    ).hexdigest()


def main() -> None:
    pool = _C.ThreadPool([_C.cpu_info()["cpus"][0]["cpu"]])
    print(_C.cpu_info()["isa_in_use"], flush=True)
    for line in sys.stdin:
        case: dict[str, Any] = json.loads(line)
        run = {"linear": digest_linear, "experts": digest_experts, "layer": layer_cases.digest}[case.pop("op")]
        print(run(pool, **case), flush=True)


if __name__ == "__main__":
    main()
