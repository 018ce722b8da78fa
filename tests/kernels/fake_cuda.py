"""The driver of csrc/tests/fake_cuda_driver.cc, compiled once, for machines without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from proa.native import _C

SOURCE = Path(__file__).parents[2] / "csrc" / "tests" / "fake_cuda_driver.cc"


def build_fake_driver(directory: Path) -> _C.CudaDriver:
    """Skips the test where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = directory / "libfake_cuda.so"
    if not library.exists():
        subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return _C.CudaDriver(str(library))
