"""What has to be settled before any test imports a kernel."""

from __future__ import annotations

import os

import torch

# Without a GPU, kernels of GPUs run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
