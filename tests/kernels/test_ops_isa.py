"""PROA_FORCE_ISA: every ISA the machine runs gives the same bits, one it does not run is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from proa.native import _C

ROOT = Path(__file__).parents[2]
TIERS = {"ref": set(), "avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
TIERS["amx"] = TIERS["avx512"] | {"amx_tile", "amx_int8"}


def run(force: str | None, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PROA_FORCE_ISA"}
    if force is not None:
        environment["PROA_FORCE_ISA"] = force
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_every_isa_gives_the_same_bits() -> None:
    detected = set(_C.cpu_info()["isa"])
    expected = None
    for tier, needs in TIERS.items():
        if not needs <= detected:
            continue
        done = run(tier, "-m", "tests.kernels.ops_digest")
        assert done.returncode == 0, done.stderr
        isa, digest = done.stdout.split()
        assert isa == tier
        expected = expected or digest
        assert digest == expected, f"{tier} differs from ref"


def test_an_isa_the_machine_lacks_is_refused() -> None:
    detected = set(_C.cpu_info()["isa"])
    lacking = [tier for tier, needs in TIERS.items() if not needs <= detected]
    for tier in [*lacking, "neon"]:
        done = run(tier, "-c", "import proa.native")
        assert done.returncode != 0
        assert "[PROA_FORCE_ISA] expected" in done.stderr and f"got {tier}" in done.stderr
        assert "ConfigError" in done.stderr
