"""Layers whose "GPU" is another native expert layer: what moves there is checked to the bit."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from tests.kernels.test_experts import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, Experts

from proa.moe.gpu_experts import ExpertArena, GpuExperts
from proa.moe.router import TopK
from proa.native import _C

CPU = torch.device("cpu")


def view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def forward_from_arena(layer, sizes, x, topk, arena, table, out, accumulate):
    """Loads a native layer with what lies in the arena of a GPU, and runs it on the experts that are there."""
    for expert, starts in enumerate(table.tolist()):
        if starts[0] < 0:
            layer.drop(expert)
            continue
        layer.reserve(expert)
        packed = torch.cat([arena[at : at + size] for at, size in zip(starts, sizes, strict=True)]).numpy()
        begin = 0
        for address, nbytes in layer.blocks(expert):
            view(address, nbytes)[:] = packed[begin : begin + nbytes]
            begin += nbytes
        layer.commit(expert)
    here = (table[topk.ids.clamp(min=0).long(), 0] >= 0) & (topk.ids >= 0)
    layer.forward(x, topk.ids.masked_fill(~here, -1), topk.weights, out, accumulate)


class NativeCompute:
    """An `ExpertCompute` that reads the arena as the GPU would, with the CPU's kernels."""

    def __init__(self, pool, fmt):
        self._layer = _C.ExpertLayer(_C.ExpertWorkspace(pool, 64), EXPERTS, HIDDEN, INTERMEDIATE, fmt, max_top_k=TOP_K)
        self.sizes = tuple(
            _C.packed_bytes(fmt, *shape) for shape in [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)]
        )

    def __call__(self, x, topk, arena, table, out, accumulate):
        forward_from_arena(self._layer, self.sizes, x, topk, arena, table, out, accumulate)


def make_gpu_experts(driver, compute, num_slots, arena=None):
    arena = arena or ExpertArena(CPU, sum(compute.sizes), num_slots)
    return GpuExperts(arena, EXPERTS, compute.sizes, compute, driver)


def to_gpu(layer, gpu, expert):
    gpu.begin(expert, layer.blocks(expert), 0)
    gpu.commit(expert)
    layer.drop(expert)


def to_cpu(layer, gpu, expert):
    layer.reserve(expert)
    gpu.fetch(expert, layer.blocks(expert), 0)
    layer.commit(expert)
    gpu.drop(expert)


def make_layer(pool, seed, fmt="int4_g32", **options):
    return Experts.make(fmt, seed).load(pool, **options)


def routing(tokens, rng):
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, TOP_K), np.float32) + np.float32(0.1)
    return TopK(torch.from_numpy(ids), torch.from_numpy(weights))


def forward(layer, x, ids, weights):
    out = torch.empty_like(x)
    layer.forward(x, ids, weights, out)
    return out


def rounding(layer, x, topk):
    """How far two float32 sums of the slots' results in different orders may be apart."""
    slots = range(topk.ids.shape[1])
    parts = [
        forward(layer, x, topk.ids[:, s : s + 1].contiguous(), topk.weights[:, s : s + 1].contiguous()) for s in slots
    ]
    return 2 * len(slots) * 2.0**-24 * sum(part.abs() for part in parts)
