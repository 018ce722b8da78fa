from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from proa.core.errors import UnsupportedError
from proa.kernels.norm import rms_norm
try:
    rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5, torch.empty(1, 4))
except UnsupportedError as error:
    print(error)
"""


def test_kernels_are_imported_without_triton_and_say_so_when_used():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "[GPU kernel _rms_norm] expected the package triton, got none. Fix: pip install triton\n"
