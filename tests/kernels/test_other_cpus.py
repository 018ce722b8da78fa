"""The extension on other CPUs, emulated by qemu-user: it loads, sees what they have, and computes right there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

QEMU = shutil.which("qemu-x86_64")

PROGRAM = """
import json, sys
from proa.layers.kernel_check import KernelUse, run_checks
from proa.native import _C
info = _C.cpu_info()
pool = _C.ThreadPool([entry["cpu"] for entry in info["cpus"]][:2])
checks = run_checks(pool, [KernelUse(name, 256, 256) for name in sys.argv[1:]])
print(json.dumps([info["isa"], info["isa_in_use"], {check.kernel: check.fault for check in checks}]))
"""


@pytest.mark.skipif(QEMU is None, reason="qemu-user is not installed")
@pytest.mark.parametrize(
    ("model", "features", "tier", "formats"),
    [
        ("Haswell-v4", ["avx2", "fma", "f16c"], "avx2", ["bf16", "fp8_block128", "int4_g32", "q4_k"]),
        ("Nehalem-v1", [], "ref", ["int4_g32"]),
    ],
)
def test_an_older_cpu_runs_its_kernels(model: str, features: list[str], tier: str, formats: list[str]) -> None:
    assert QEMU is not None
    command = [QEMU, "-cpu", model, sys.executable, "-c", PROGRAM, *formats]
    # numpy's OpenBLAS goes by vendor and family, which qemu takes from the host, and may find AVX2 where there is none.
    env = {**os.environ, "OPENBLAS_CORETYPE": model.partition("-")[0]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [features, tier, {f"{tier}.{name}": "" for name in sorted(formats)}]
