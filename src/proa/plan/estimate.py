"""Tokens per second as intervals: bytes over bandwidth, widened by what runs have reached of it.

The shares are those of benchmarks/LOG.md: `proa bench experts` for the CPU's experts, `proa bench hybrid` for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from proa.layers.mla import MlaSpec
from proa.plan.hardware import Interval, Machine
from proa.plan.memory_plan import MemoryPlan
from proa.plan.model_sizes import ModelSizes

__all__ = ["Estimate", "estimate_decode", "estimate_prefill"]

# Of the read bandwidth that experts have, at least: with one token each, and with several.
DECODE_SHARE, BATCH_SHARE = 0.85, 0.6
STREAM_SHARE = 0.92  # of the rate of pinned copies that streamed experts have, at least
CHUNK_OVERHEAD = 1.05  # a chunk's time beside the slower of copies and computing
HAND_OVER_S = 15e-6  # from the GPU to the CPU and back, per layer
# What a step takes beside its layers: scheduling and drawing a token; a vocabulary that is sorted takes longest.
STEP_S = 4e-3
GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens per second. `bound`: what no run can exceed; `range`: what is to be expected.

    ram_bytes, vram_bytes, pcie_bytes: read or copied for a step of decoding or for a whole prompt. flops: likewise.
    """

    bound: float
    range: Interval
    ram_bytes: float = 0.0
    vram_bytes: float = 0.0
    pcie_bytes: float = 0.0
    flops: float = 0.0


def estimate_decode(sizes: ModelSizes, plan: MemoryPlan, machine: Machine) -> Estimate:
    """All requests of `plan` together, each with its whole context behind it."""
    experts, requests = sizes.info.experts, plan.concurrency
    # Experts that at least one request needs, if the router chooses evenly.
    distinct = experts.experts * (1 - (1 - experts.top_k / experts.experts) ** requests)
    expert_bytes = experts.layers * distinct * sizes.bytes_per_expert
    on_gpu = plan.gpu_experts / max(1, experts.layers * experts.experts)
    cache = float(plan.kv_token_bytes * plan.context * requests)
    trunk = float(sizes.gpu_trunk_bytes - sizes.embedding_bytes)
    share = DECODE_SHARE if requests == 1 else BATCH_SHARE
    if not plan.uses_gpu:
        ram = expert_bytes + trunk + cache
        seconds = ram / (machine.read_gb_s * GIGA)
        worst = seconds / share + STEP_S
        return Estimate(requests / seconds, Interval(requests / worst, requests / seconds), ram)
    ram, vram = expert_bytes * (1 - on_gpu), expert_bytes * on_gpu + trunk + cache
    cpu = ram / (machine.read_gb_s * GIGA)
    fast, slow = vram / (machine.vram.high * GIGA), vram / (machine.vram.low * GIGA)
    hand_overs = HAND_OVER_S * experts.layers if ram > 0 else 0.0
    # Attention waits for the experts of the layer before; those on the GPU are computed beside the CPU's.
    best = max(cpu, expert_bytes * on_gpu / (machine.vram.high * GIGA)) + (trunk + cache) / (machine.vram.high * GIGA)
    worst = cpu / share + slow + hand_overs + STEP_S
    return Estimate(requests / max(cpu, fast), Interval(requests / worst, requests / best), ram, vram)


def estimate_prefill(sizes: ModelSizes, plan: MemoryPlan, machine: Machine) -> Estimate:
    """One prompt as long as the context, alone."""
    tokens, experts = plan.context, sizes.info.experts
    passes = -(-tokens // plan.chunk)
    # In the last layer only the last token is computed further than attention.
    last_is_moe = sizes.spec.num_layers - 1 in sizes.spec.moe_layers
    full = (experts.layers - last_is_moe) / max(1, experts.layers)
    expert_flops = 2.0 * tokens * full * sizes.expert_parameters * experts.top_k / max(1, experts.experts)
    trunk_flops = 2.0 * tokens * _prompt_parameters(sizes) + _attention_flops(sizes, tokens)
    away = full * (sizes.expert_bytes - sizes.bytes_per_expert * plan.gpu_experts)
    share = away / max(1.0, full * sizes.expert_bytes)
    if plan.streams and tokens >= plan.chunk // 2:
        flops, moved = expert_flops + trunk_flops, passes * away
        # Beside the bus the CPU computes those experts that few tokens need.
        bus, cpu = (
            machine.pcie.high * GIGA / max(1.0, moved),
            machine.cpu_tflops.high * TERA / max(1.0, expert_flops * share),
        )
        best = max(1 / (bus + cpu), flops / (machine.gpu_tflops.high * TERA))
        slow = moved / (STREAM_SHARE * machine.pcie.low * GIGA) + flops / (machine.gpu_tflops.low * TERA)
        return _prompt(tokens, best, best, slow * CHUNK_OVERHEAD + passes * STEP_S, pcie_bytes=moved, flops=flops)
    cpu_flops = expert_flops * share + (0.0 if plan.uses_gpu else trunk_flops)
    gpu_flops = expert_flops + trunk_flops - cpu_flops
    read = passes * (away + (0.0 if plan.uses_gpu else sizes.trunk_bytes - sizes.embedding_bytes))
    read_s = read / (machine.read_gb_s * GIGA)
    cpu_best = max(read_s, cpu_flops / (machine.cpu_tflops.high * TERA))
    cpu_worst = read_s / BATCH_SHARE + cpu_flops / (machine.cpu_tflops.low * TERA)
    gpu_best, gpu_worst = (gpu_flops / (rate * TERA) for rate in (machine.gpu_tflops.high, machine.gpu_tflops.low))
    return _prompt(
        tokens,
        max(cpu_best, gpu_best),
        max(cpu_best, gpu_best) if plan.gpu_experts else cpu_best + gpu_best,
        cpu_worst + gpu_worst + passes * STEP_S,
        ram_bytes=read,
        flops=cpu_flops + gpu_flops,
    )


def _prompt_parameters(sizes: ModelSizes) -> int:
    """Of the trunk, that every token of a prompt is multiplied with: no head, and no MLP of the last layer."""
    spec, moe = sizes.spec, sizes.spec.moe
    last = moe.shared_intermediate if spec.num_layers - 1 in spec.moe_layers else spec.dense_intermediate
    return sizes.trunk_parameters - spec.hidden * (spec.vocab_size + 3 * last)


def _prompt(tokens: int, floor_s: float, best_s: float, worst_s: float, **amounts: float) -> Estimate:
    return Estimate(tokens / floor_s, Interval(tokens / worst_s, tokens / best_s), **amounts)


def _attention_flops(sizes: ModelSizes, tokens: int) -> float:
    """Products with keys and with values; a token meets half of the others on average."""
    attention = sizes.spec.attention
    if isinstance(attention, MlaSpec):
        width = attention.nope_dim + attention.rope_dim + attention.value_dim
    else:
        width = 2 * attention.head_dim
    return 2.0 * sizes.spec.num_layers * attention.num_heads * width * tokens * tokens / 2
