"""The trunk's operations in plain torch, on tensors of any device: what the GPU kernels have to compute, slowly.

Signatures are those of the kernels beside this file and of `proa.native.ops` without its thread pool: float32
activations, int32 indices, results written into `out`, rows may be strided.
"""

from __future__ import annotations

import torch

__all__ = [
    "add_rms_norm",
    "embedding_rows",
    "gated_product",
    "kv_store",
    "paged_attention",
    "rms_norm",
    "rope",
    "route",
]

# Attention scores of one sequence are computed for as many queries at once as keep them below this many bytes.
_SCORE_BYTES = 256 << 20


def embedding_rows(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """`out[t] = table[ids[t]]`; table float32 or bf16 `[V, H]`, out `[T, H]`."""
    out.copy_(table.index_select(0, ids))


def kv_store(src: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """`cache[slots[t]] = src[t]`; src `[T, W]`, cache float32 or bf16 `[num_slots, W]`."""
    cache.index_copy_(0, slots.long(), src.to(cache.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """`out = x * rsqrt(mean(x^2) + eps) * weight` over the last dimension; `out` may be `x`."""
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """`residual += delta`, then `out = rms_norm(residual)`."""
    residual.add_(delta)
    rms_norm(residual, weight, eps, out)


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    offset: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotates dims `offset .. offset + R` of each head of x `[T, heads, D]` in place; cos, sin `[positions, R / 2]`."""
    half = cos.shape[1]
    rotated = x[:, :, offset : offset + 2 * half]
    if interleaved:
        first, second = rotated[:, :, 0::2], rotated[:, :, 1::2]
    else:
        first, second = rotated[:, :, :half], rotated[:, :, half:]
    c, s = cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]
    new_first, new_second = first * c - second * s, second * c + first * s
    first.copy_(new_first)
    second.copy_(new_second)


def gated_product(gate_up: torch.Tensor, out: torch.Tensor, *, gating: str, limit: float, alpha: float) -> None:
    """`g * sigmoid(g) * u` ("silu") or `g * sigmoid(alpha * g) * (u + 1)` ("swigluoai").

    g = min(gate, limit), u = clamp(up, -limit, limit); gate_up `[T, 2 I]`, gate before up; out `[T, I]`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    if gating == "silu":
        out.copy_(g * torch.sigmoid(g) * u)
    else:
        out.copy_(g * torch.sigmoid(alpha * g) * (u + 1.0))


def route(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    score: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    counts: torch.Tensor | None = None,
) -> None:
    """Chooses the top-k experts of each token, as `proa.native.ops.route`; of equal ranks the lower expert wins."""
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, -1)
    ranks = scores if bias is None else scores + bias
    if top_groups < num_groups:
        groups = ranks.unflatten(1, (num_groups, -1))
        best = groups.topk(min(2, groups.shape[2]), -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, _largest(best, top_groups), 1.0)
        ranks = groups.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    chosen = _largest(ranks, ids.shape[1])
    picked = scores.gather(1, chosen)
    if renormalize:
        picked = picked / (picked.sum(-1, keepdim=True) + eps)
    ids.copy_(chosen)
    weights.copy_(picked * scale)
    if counts is not None:
        counts += torch.bincount(chosen.flatten(), minlength=counts.shape[0])


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    sequence_ids: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`out[t, h] = softmax(scale * q[t, h] . K) V` over positions `0 .. positions[t]` of sequence `sequence_ids[t]`.

    Shapes as in `proa.native.ops.paged_attention`. Waits for the device: it loops over the sequences.
    """
    sequences, last = sequence_ids.tolist(), positions.tolist()
    num_heads, kv_heads = q.shape[1], k_cache.shape[1]
    start = 0
    while start < len(sequences):
        stop = start + 1
        while stop < len(sequences) and sequences[stop] == sequences[start]:
            stop += 1
        stop = min(stop, start + max(1, _SCORE_BYTES // (4 * num_heads * (last[stop - 1] + 1))))
        context = last[stop - 1] + 1
        place = torch.arange(context, device=q.device)
        slots = block_tables[sequences[start], place // block_size].long() * block_size + place % block_size
        keys, values = k_cache[slots].float(), v_cache[slots].float()
        queries = q[start:stop].unflatten(1, (kv_heads, -1))
        scores = torch.einsum("tkgd,ckd->tkgc", queries, keys) * scale
        future = place > positions[start:stop, None]
        weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("tkgc,ckd->tkgd", weights, values).flatten(1, 2)
        start = stop


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest of each row, largest first, the lower index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
