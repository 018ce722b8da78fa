"""Prints the ISA in use and a digest of every operator's results; run under different PROA_FORCE_ISA."""

from __future__ import annotations

import hashlib
import sys

import torch
from tests.kernels.ops_cases import AttentionCase

from proa.native import _C, ops
from proa.native.runtime import CpuRuntime


def results(pool: ops.ThreadPool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = []
    for size in (1, 31, 64, 576):
        x, weight, delta = torch.randn(9, size), torch.randn(size), torch.randn(9, size)
        out, residual = torch.empty_like(x), x.clone()
        ops.rms_norm(pool, x, weight, 1e-5, out)
        tensors.append(out.clone())
        ops.add_rms_norm(pool, residual, delta, weight, 1e-5, out)
        tensors += [residual, out]
    x, angles = torch.randn(9, 3, 40), torch.rand(9, 16)
    ops.rope(pool, x, angles.cos(), angles.sin(), torch.arange(9).int(), offset=3, interleaved=True)
    cache = torch.zeros(9, 120, dtype=torch.bfloat16)
    ops.kv_store(pool, x.flatten(1), cache, torch.arange(9).int())
    embedded = torch.empty(9, 120)
    ops.embedding_rows(pool, cache, torch.arange(9).int(), embedded)
    tensors += [x, embedded]
    for dtype in (torch.float32, torch.bfloat16):
        for shape in (
            {"heads": 6, "kv_heads": 2, "key_dim": 64},
            {"heads": 5, "kv_heads": 1, "key_dim": 33, "value_dim": 19},
            {"heads": 16, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "latent": True},
        ):
            case = AttentionCase.make([(1020, 6), (0, 33)], dtype=dtype, **shape)
            out = case.new_out()
            ops.paged_attention(pool, *case.args(), out)
            tensors.append(out)
    return tensors


def main() -> None:
    digest = hashlib.sha256()
    with CpuRuntime() as runtime:
        for tensor in results(runtime.pool):
            digest.update(tensor.contiguous().numpy().tobytes())
    sys.stdout.write(f"{_C.cpu_info()['isa_in_use']} {digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
