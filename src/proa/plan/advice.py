"""What to change when a model does not fit: each way was planned again and fits, the cheapest come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from proa.plan.hardware import GIB, Machine
from proa.plan.memory_plan import Wanted, largest, plan_memory
from proa.plan.model_sizes import EXPERT_FORMATS, ModelSizes

__all__ = ["Advice", "cheapest_ways"]

_LEAST_CONTEXT = 1024
_MOST_GIB = 1 << 16


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to fit: in words, and as the arguments of `plan_memory` that it leads to."""

    text: str
    sizes: ModelSizes
    machine: Machine
    wanted: Wanted

    @property
    def fits(self) -> bool:
        return plan_memory(self.sizes, self.machine, self.wanted).fits


# Ways of one kind, of which the first that fits is taken.
_Policy = Callable[[ModelSizes, Machine, Wanted], Iterator[Advice]]


def cheapest_ways(sizes: ModelSizes, machine: Machine, wanted: Wanted, limit: int = 3) -> list[Advice]:
    """Up to `limit` ways to fit: first what only takes flags, then what costs quality, then what costs money."""
    ways: list[Advice] = []
    for policy in _POLICIES:
        for way in policy(sizes, machine, wanted):
            if way.fits:
                ways.append(way)
                break
        if len(ways) == limit:
            break
    return ways


def _smaller_cache(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    if wanted.kv_dtype != "bfloat16":
        yield Advice("--kv-cache-dtype bfloat16", sizes, machine, replace(wanted, kv_dtype="bfloat16"))


def _fewer_requests(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    def with_requests(requests: int) -> Advice:
        return Advice(f"--concurrency {requests}", sizes, machine, replace(wanted, concurrency=requests))

    requests = largest(1, wanted.concurrency - 1, lambda requests: with_requests(requests).fits)
    if requests is not None:
        yield with_requests(requests)


def _fewer_tokens(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    def with_context(blocks: int) -> Advice:
        tokens = blocks * _LEAST_CONTEXT
        return Advice(f"--context {tokens}", sizes, machine, replace(wanted, context=tokens))

    most = (wanted.context_for(sizes.info.max_position_embeddings) - 1) // _LEAST_CONTEXT
    blocks = largest(1, most, lambda blocks: with_context(blocks).fits)
    if blocks is not None:
        yield with_context(blocks)


def _trunk_on_cpu(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    if machine.vram_bytes and wanted.use_gpu:
        yield Advice("--device cpu: everything in RAM", sizes, machine, replace(wanted, use_gpu=False))


def _smaller_experts(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    for name, (bytes_per_weight, how) in EXPERT_FORMATS.items():
        if bytes_per_weight < sizes.bytes_per_expert_weight * 0.99:
            yield Advice(f"experts in {name}: {how}", sizes.with_expert_format(name), machine, wanted)


def _more_ram(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    def with_more(gib: int) -> Advice:
        bigger = replace(machine, ram_bytes=machine.ram_bytes + gib * GIB)
        return Advice(f"{gib} GiB more RAM", sizes, bigger, wanted)

    gib = _smallest(lambda gib: with_more(gib).fits)
    if gib is not None:
        yield with_more(gib)


def _more_vram(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
    def with_more(gib: int) -> Advice:
        text = f"{gib} GiB more GPU memory" if machine.vram_bytes else f"a GPU with {gib} GiB free"
        return Advice(text, sizes, replace(machine, vram_bytes=machine.vram_bytes + gib * GIB), wanted)

    gib = _smallest(lambda gib: with_more(gib).fits)
    if gib is not None:
        yield with_more(gib)


def _with_trunk_on_cpu(policy: _Policy) -> _Policy:
    """Both, for a machine that lacks GPU memory as well as RAM."""

    def ways(sizes: ModelSizes, machine: Machine, wanted: Wanted) -> Iterator[Advice]:
        if machine.vram_bytes and wanted.use_gpu:
            for way in policy(sizes, machine, replace(wanted, use_gpu=False)):
                yield replace(way, text=f"--device cpu, and {way.text}")

    return ways


def _smallest(fits: Callable[[int], bool]) -> int | None:
    """The least number of GiB from which on it fits."""
    most_refused = largest(0, _MOST_GIB, lambda gib: not fits(gib))
    if most_refused is None or most_refused == _MOST_GIB:
        return None
    return most_refused + 1


# By what they cost.
_POLICIES: tuple[_Policy, ...] = (
    _smaller_cache,
    _fewer_requests,
    _fewer_tokens,
    _trunk_on_cpu,
    _smaller_experts,
    _with_trunk_on_cpu(_smaller_experts),
    _more_ram,
    _more_vram,
    _with_trunk_on_cpu(_more_ram),
)
