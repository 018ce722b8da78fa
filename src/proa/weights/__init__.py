"""Reading checkpoints: safetensors files, the directory around them, linears in their stored format."""

from __future__ import annotations

from proa.weights.checkpoint import Checkpoint, RawTensor
from proa.weights.linear import RawLinear, read_linear
from proa.weights.progress import LoadProgress, LoadStatus

__all__ = ["Checkpoint", "LoadProgress", "LoadStatus", "RawLinear", "RawTensor", "read_linear"]
