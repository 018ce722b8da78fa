"""The self-test of a trunk on a GPU: fixed inputs through the kernels that a model runs on, beside plain torch.

The kernels are compiled as the model needs them, so a first load pays for that; the products themselves take
milliseconds. Routed experts on the GPU have their own (`proa.moe.grouped`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from proa.attention.backend import AttentionBackend
from proa.attention.batch import ForwardBatch
from proa.attention.shape import gpu_block_tokens
from proa.core.errors import KernelFaultError
from proa.device.backend import Device
from proa.kernels import reference
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVDtype, KVPool
from proa.layers.kernel_check import KernelUse
from proa.layers.known_data import known_activations, known_product, known_values, known_weight
from proa.native._C import PackedWeight

__all__ = ["check_gpu_trunk", "raise_fault"]

OUT_FEATURES, IN_FEATURES, HEADS = 48, 512, 2
# One token, several, and enough for tensor cores.
TOKENS = (1, 6, 40)
# Of the sum of the magnitudes of all products: weights rounded to bf16, 2^-9. The activations are integers that bf16
# holds; sums of 512 float32 terms add 512 / 2^24.
LINEAR_TOLERANCE = 2.0**-8
# Of the largest input: float32, a few roundings of each and of exp, rsqrt and sums of 512.
ROW_TOLERANCE = 2.0**-14
# Of the largest value: the weights of values are rounded to bf16, 2^-9; queries and keys are eighths, which it holds.
ATTENTION_TOLERANCE: dict[KVDtype, float] = {"bfloat16": 2.0**-8, "float32": 2.0**-14}
# Contexts and tokens of sequences: two of one token, one of a chunk longer than what counts as single tokens.
SEQUENCES = ((1, 1), (150, 1), (90, 40))


def check_gpu_trunk(
    device: Device, attention: AttentionBackend, uses: Iterable[KernelUse], layout: KVLayout, num_heads: int
) -> None:
    """Raises KernelFaultError naming the kernels that do not compute what they should: nothing may be served then.

    `uses`: weights of the trunk, and others; `layout`: of the KV cache.
    """
    formats = sorted({use.format for use in uses if use.activations == "trunk"})
    for weight_format in formats:
        raise_fault(f"linears of {weight_format}", _linear_fault(device, weight_format))
        if layout.latent:
            raise_fault(f"linears of heads of {weight_format}", _heads_fault(device, weight_format))
    for name, difference in _row_differences(device):
        raise_fault(name, "" if difference <= ROW_TOLERANCE else f"a difference of {difference:.3g}")
    dtype: KVDtype = "float32" if formats == ["f32"] else "bfloat16"
    raise_fault(f"attention over a cache of {dtype}", _attention_fault(device, attention, layout, num_heads, dtype))


def raise_fault(kernel: str, fault: str) -> None:
    """KernelFaultError unless `fault` is empty."""
    if fault:
        fix = "run with --device cpu, and report this with the output of `proa doctor`"
        raise KernelFaultError(f"GPU kernel: {kernel}", "the known result of its self-test", fault, fix)


def _linear_fault(device: Device, weight_format: str) -> str:
    raw = known_weight(weight_format, OUT_FEATURES, IN_FEATURES, 0)
    values = known_values(raw, PackedWeight.pack(device.runtime.pool, raw))
    weight = device.pack(raw)
    for tokens in TOKENS:
        x = known_activations(tokens, IN_FEATURES)
        found = torch.full((tokens, OUT_FEATURES), torch.nan, device=device.torch_device)
        weight.forward(torch.from_numpy(x).to(device.torch_device), found)
        fault = _product_fault(found.cpu().numpy(), x, values)
        if fault:
            return f"{tokens} tokens: {fault}"
    return ""


def _heads_fault(device: Device, weight_format: str) -> str:
    raws = [known_weight(weight_format, OUT_FEATURES, IN_FEATURES, head) for head in range(HEADS)]
    weight = device.pack_heads(raws)
    for tokens in TOKENS:
        x = np.stack([known_activations(tokens + 1, IN_FEATURES)[i : i + tokens] for i in range(HEADS)], 1)
        found = torch.full((tokens, HEADS, OUT_FEATURES), torch.nan, device=device.torch_device)
        weight.forward(torch.from_numpy(x).to(device.torch_device), found)
        for head, raw in enumerate(raws):
            values = known_values(raw, PackedWeight.pack(device.runtime.pool, raw))
            fault = _product_fault(found[:, head].cpu().numpy(), x[:, head], values)
            if fault:
                return f"{tokens} tokens, head {head}: {fault}"
    return ""


def _product_fault(found: np.ndarray, x: np.ndarray, weight: np.ndarray) -> str:
    expected = known_product(x, weight)
    difference = np.abs(found - expected)
    allowed = LINEAR_TOLERANCE * known_product(np.abs(x), np.abs(weight))
    if (difference <= allowed).all():
        return ""
    token, row = (int(index) for index in np.unravel_index(np.argmax(difference - allowed), difference.shape))
    return f"{found[token, row]} in row {row}, not {expected[token, row]:.9g}"


def _row_differences(device: Device) -> Iterator[tuple[str, float]]:
    """Operations on rows and how far each is from plain torch, in parts of the largest input."""

    def rows(count: int, columns: int) -> torch.Tensor:
        return torch.from_numpy(known_activations(count, columns)).to(device.torch_device) / 32

    x, delta, weight = rows(6, IN_FEATURES), rows(7, IN_FEATURES)[1:], rows(1, IN_FEATURES)[0]
    cos, sin = torch.cos(rows(16, 32)), torch.sin(rows(16, 32))
    positions = torch.arange(6, dtype=torch.int32, device=device.torch_device)

    def difference(change: Callable[[Device], torch.Tensor]) -> float:
        found, expected = change(device), change(reference)  # type: ignore[arg-type]
        worst = (found - expected).abs().max() / 4  # inputs are up to 127 / 32
        return float(worst.nan_to_num(torch.inf))

    def norm(kernels: Device) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        kernels.rms_norm(x, weight, 1e-6, out)
        return out

    def add_norm(kernels: Device) -> torch.Tensor:
        residual, out = x.clone(), torch.full_like(x, torch.nan)
        kernels.add_rms_norm(residual, delta, weight, 1e-6, out)
        return torch.cat([residual, out])

    def rotated(kernels: Device) -> torch.Tensor:
        both = [x.clone().view(6, 4, 128) for _ in range(2)]
        for interleaved, heads in enumerate(both):
            kernels.rope(heads, cos, sin, positions, offset=64, interleaved=bool(interleaved))
        return torch.cat(both)

    def chosen(kernels: Device) -> torch.Tensor:
        ids = torch.full((6, 8), -1, dtype=torch.int32, device=x.device)
        weights = torch.full((6, 8), torch.nan, device=x.device)
        logits = x[:, :384] + torch.arange(384, device=x.device) / 1000  # no ties
        kernels.route(logits, ids, weights, score="sigmoid")
        return torch.cat([ids.float(), weights])

    for name, change in (("norm", norm), ("norm of a sum", add_norm), ("rotation", rotated), ("router", chosen)):
        yield name, difference(change)


def _attention_fault(
    device: Device, attention: AttentionBackend, layout: KVLayout, num_heads: int, dtype: KVDtype
) -> str:
    block = gpu_block_tokens(layout)
    where, tables = device.torch_device, torch.arange(9, dtype=torch.int32).flip(0).view(3, 3)
    one = KVLayout(1, layout.num_kv_heads, layout.key_dim, layout.value_dim, latent=layout.latent)
    kv = KVPool(one, tables.numel(), block, dtype, where)
    for seed, cache in enumerate({id(cache): cache for cache in (kv.key(0), kv.value(0))}.values()):
        cache.copy_(_eighths(cache.shape, seed))
    positions = torch.cat([torch.arange(context - count, context) for context, count in SEQUENCES]).int()
    ids = torch.cat([torch.full((count,), s) for s, (_, count) in enumerate(SEQUENCES)]).int()
    slots = tables[ids.long(), positions // block] * block + positions % block
    tokens = len(ids)
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int32, device=where),
        positions=positions.to(where),
        sequence_ids=ids.to(where),
        slots=slots.to(where),
        block_tables=tables.to(where),
        block_size=block,
        logit_rows=torch.zeros(0, dtype=torch.int32, device=where),
        num_single=2,
    )
    query = _eighths((tokens, num_heads, layout.key_dim), 2).to(where)
    out, expected = (torch.full((tokens, num_heads, layout.value_dim), torch.nan, device=where) for _ in range(2))
    key, value = (cache.float().flatten(1)[batch.slots.long()] for cache in (kv.key(0), kv.value(0)))
    scale = 8 * layout.key_dim**-0.5  # scores far enough apart for some positions to count more
    step = attention.begin(batch, kv)
    step.attend(0, query=query, key=key, value=None if layout.latent else value, scale=scale, out=out)
    reference.paged_attention(
        query, kv.key(0), kv.value(0), batch.block_tables, block, batch.sequence_ids, batch.positions, scale, expected
    )
    worst = float((out - expected).abs().max().nan_to_num(torch.inf))
    return "" if worst <= ATTENTION_TOLERANCE[dtype] else f"a difference of {worst:.3g} among values up to 1"


def _eighths(shape: Iterable[int], seed: int) -> torch.Tensor:
    """Values -7/8 .. 7/8 float32, which bf16 holds."""
    sizes = tuple(shape)
    columns = sizes[-1]
    rows = int(np.prod(sizes[:-1]))
    return torch.from_numpy(known_activations(rows + 3 * seed, columns)[3 * seed :]).fmod(8).div(8).view(sizes)
