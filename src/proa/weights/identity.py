"""Which model some weights are, told without reading them all: hashes of headers, and of the routers' values."""

from __future__ import annotations

import hashlib

from proa.gguf.model import GgufModel
from proa.weights.checkpoint import INDEX_FILE, Checkpoint
from proa.weights.expert_source import ExpertLayout
from proa.weights.linear import read_linear
from proa.weights.quantize import dequantize

__all__ = ["gguf_hash", "model_hash", "router_hash"]

_DIGEST_BYTES = 16


def model_hash(checkpoint: Checkpoint) -> str:
    """Of config.json, the index, and name, size and header of every weight file. Not of where they lie."""
    digest = _Digest()
    for name in ("config.json", INDEX_FILE):
        path = checkpoint.path / name
        digest.add(name.encode(), path.read_bytes() if path.exists() else b"")
    for file in checkpoint.files:
        digest.add(file.path.name.encode(), str(file.nbytes).encode(), file.header)
    return digest.text()


def gguf_hash(model: GgufModel) -> str:
    """Of name, size and header of every file."""
    digest = _Digest()
    for file in model.files:
        digest.add(file.path.name.encode(), str(file.nbytes).encode(), file.header)
    return digest.text()


def router_hash(checkpoint: Checkpoint, layout: ExpertLayout) -> str:
    """Of the first and the last router as float32 `[num_experts, hidden]`: the same whatever quantized the model.

    CheckpointError when the checkpoint lacks them or they have another shape.
    """
    digest = _Digest()
    shape = (layout.shape.num_experts, layout.shape.hidden)
    for layer in (min(layout.routers), max(layout.routers)):
        digest.add(dequantize(read_linear(checkpoint, layout.routers[layer], shape)).tobytes())
    return digest.text()


class _Digest:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, *parts: bytes) -> None:
        for part in parts:
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)

    def text(self) -> str:
        return self._hash.hexdigest()
