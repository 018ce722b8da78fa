"""How checkpoints store a linear: one module per kind, `STORAGES` in the order they are looked for."""

from __future__ import annotations

from proa.weights.stored import fp4, fp8, gptq, int4, int8, plain
from proa.weights.stored.tensors import LinearTensors, Storage

__all__ = ["STORAGES", "LinearTensors", "Storage"]

STORAGES: tuple[Storage, ...] = (
    gptq.STORAGE,
    *fp4.STORAGES,
    int4.STORAGE,
    int8.STORAGE,
    *fp8.STORAGES,
    plain.STORAGE,
)
