"""What to change when a model does not fit: each way was planned again and fits, the cheapest come first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from proa.engine.config import EngineConfig
from proa.engine.solve import largest
from proa.plan.hardware import GIB, Machine
from proa.plan.memory_plan import plan_memory, whole_requests
from proa.plan.model_sizes import EXPERT_FORMATS, ModelSizes

__all__ = ["PLAN_FLAGS", "Advice", "cheapest_ways"]

_LEAST_TOKENS = 1024
_MOST_GIB = 1 << 16
# Settings that `proa plan` knows, and how they are told it.
PLAN_FLAGS = {
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_running_requests": "--concurrency",
    "context_length": "--context",
    "device": "--device",
}
# Settings that bind what would otherwise be solved.
_BINDING = ("chunked_prefill_size", "gpu_prefill_threshold", "mem_fraction_static", "cuda_graph_max_bs")
_SOLVED = ("max_running_requests", "max_total_tokens", "context_length")
_OPEN = EngineConfig(model_path="", to_engine="", from_engine="")


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to fit: what it leads to, and `words` for what no setting changes."""

    sizes: ModelSizes
    machine: Machine
    config: EngineConfig
    words: str = ""

    @property
    def fits(self) -> bool:
        return plan_memory(self.sizes, self.machine, self.config).fits

    def text(self, before: EngineConfig, flags: Mapping[str, str]) -> str:
        """As the change from `before`, by the names of `flags`; a setting without a name there follows from others."""
        changed = {flags[field]: getattr(self.config, field) for field in _changed_fields(self.config, before, flags)}
        told = " ".join(f"{flag} {value}" for flag, value in changed.items() if value is not None)
        left_out = " and ".join(flag for flag, value in changed.items() if value is None)
        return ", ".join(part for part in (told, left_out and f"without {left_out}", self.words) if part)


@dataclass(frozen=True, slots=True)
class _Case:
    """What does not fit, and which settings may be changed. `words`: of what was changed already."""

    sizes: ModelSizes
    machine: Machine
    config: EngineConfig
    fields: frozenset[str]
    words: str = ""

    def changed(self, words: str = "", **settings: Any) -> Advice:
        config = msgspec.structs.replace(self.config, **settings)
        return Advice(self.sizes, self.machine, config, self._also(words))

    def equipped(self, words: str, machine: Machine) -> Advice:
        return Advice(self.sizes, machine, self.config, self._also(words))

    def with_experts(self, name: str) -> Advice:
        words = f"experts in {name}: {EXPERT_FORMATS[name][1]}"
        return Advice(self.sizes.with_expert_format(name), self.machine, self.config, self._also(words))

    def _also(self, words: str) -> str:
        return ", ".join(part for part in (self.words, words) if part)


# Ways of one kind, of which the first that fits is taken.
_Policy = Callable[[_Case], Iterator[Advice]]


def cheapest_ways(
    sizes: ModelSizes, machine: Machine, config: EngineConfig, flags: Mapping[str, str] = PLAN_FLAGS, limit: int = 3
) -> list[Advice]:
    """Up to `limit` ways to fit: first what only takes settings out of `flags`, then what costs quality, then money.

    None changes what a cheaper one shows to be enough.
    """
    case = _Case(sizes, machine, config, frozenset(flags))
    ways: list[Advice] = []
    for policy in _POLICIES:
        way = next((way for way in policy(case) if way.fits), None)
        if way is not None and not any(_goes_further(way, known, config) for known in ways):
            ways.append(way)
        if len(ways) == limit:
            break
    return ways


def _goes_further(way: Advice, known: Advice, before: EngineConfig) -> bool:
    """Whether `way` changes all that `known` changes, and something else."""
    return _changed(known, before) < _changed(way, before)


def _changed(way: Advice, before: EngineConfig) -> set[str]:
    # Hardware and formats by their words, without numbers.
    return set(_changed_fields(way.config, before, EngineConfig.__struct_fields__)) | {
        part.strip("0123456789 ") for part in way.words.split(", ") if part
    }


def _changed_fields(config: EngineConfig, before: EngineConfig, fields: Iterable[str]) -> list[str]:
    return [field for field in fields if getattr(config, field) != getattr(before, field)]


def _what_binds(case: _Case) -> Iterator[Advice]:
    for field in _BINDING:
        if field in case.fields and getattr(case.config, field) != getattr(_OPEN, field):
            yield case.changed(**{field: getattr(_OPEN, field)})


def _all_open(case: _Case) -> Iterator[Advice]:
    """Everything that is solved left to be solved, where the flags have all of it."""
    if case.fields.issuperset(_SOLVED):
        yield case.changed(**{field: getattr(_OPEN, field) for field in (*_BINDING, *_SOLVED)})


def _smaller_cache(case: _Case) -> Iterator[Advice]:
    if case.config.kv_cache_dtype != "bfloat16":
        yield case.changed(kv_cache_dtype="bfloat16")


def _fewer_requests(case: _Case) -> Iterator[Advice]:
    def with_requests(requests: int) -> Advice:
        return case.changed(max_running_requests=requests, **_tokens(case.config, requests=requests))

    requests = largest(1, (case.config.max_running_requests or 1) - 1, lambda requests: with_requests(requests).fits)
    if requests is not None:
        yield with_requests(requests)


def _fewer_tokens(case: _Case) -> Iterator[Advice]:
    """Of each request."""

    def with_context(blocks: int) -> Advice:
        context = blocks * _LEAST_TOKENS
        return case.changed(context_length=context, **_tokens(case.config, context=context))

    if case.config.context_length is not None:
        most = (case.config.context_length - 1) // _LEAST_TOKENS
        blocks = largest(1, most, lambda blocks: with_context(blocks).fits)
        if blocks is not None:
            yield with_context(blocks)


def _smaller_total(case: _Case) -> Iterator[Advice]:
    """A cache that requests share, with their context as it is."""
    total = case.config.max_total_tokens

    def with_total(blocks: int) -> Advice:
        return case.changed(max_total_tokens=blocks * _LEAST_TOKENS)

    if "max_total_tokens" in case.fields and total is not None:
        least = -(-(case.config.context_length or 1) // _LEAST_TOKENS)
        blocks = largest(least, (total - 1) // _LEAST_TOKENS, lambda blocks: with_total(blocks).fits)
        if blocks is not None:
            yield with_total(blocks)


def _tokens(config: EngineConfig, *, requests: int | None = None, context: int | None = None) -> dict[str, Any]:
    """The size of the cache, where it is told, that so many requests of such a context fill at most."""
    context = context or config.context_length
    if config.max_total_tokens is None or context is None:
        return {}
    filled = whole_requests(requests or config.requests, context)
    return {"max_total_tokens": min(config.max_total_tokens, filled)}


def _trunk_on_cpu(case: _Case) -> Iterator[Advice]:
    if case.machine.vram_bytes and case.config.device != "cpu":
        yield case.changed("everything in RAM", device="cpu")


def _smaller_experts(case: _Case) -> Iterator[Advice]:
    for name, (bytes_per_weight, _) in EXPERT_FORMATS.items():
        if bytes_per_weight < case.sizes.bytes_per_expert_weight * 0.99:
            yield case.with_experts(name)


def _more_ram(case: _Case) -> Iterator[Advice]:
    def with_more(gib: int) -> Advice:
        bigger = replace(case.machine, ram_bytes=case.machine.ram_bytes + gib * GIB)
        return case.equipped(f"{gib} GiB more RAM", bigger)

    gib = _smallest(lambda gib: with_more(gib).fits)
    if gib is not None:
        yield with_more(gib)


def _more_vram(case: _Case) -> Iterator[Advice]:
    machine = case.machine

    def with_more(gib: int) -> Advice:
        words = f"{gib} GiB more GPU memory" if machine.vram_bytes else f"a GPU with {gib} GiB free"
        total = machine.vram_total_bytes and machine.vram_total_bytes + gib * GIB
        return case.equipped(words, replace(machine, vram_bytes=machine.vram_bytes + gib * GIB, vram_total_bytes=total))

    if case.config.device == "cpu":
        return
    gib = _smallest(lambda gib: with_more(gib).fits)
    if gib is not None:
        yield with_more(gib)


def _after(first: _Policy, then: _Policy) -> _Policy:
    """Both: the last way of the first, which goes furthest, and on top of it those of the second."""

    def ways(case: _Case) -> Iterator[Advice]:
        for way in list(first(case))[-1:]:
            yield from then(_Case(way.sizes, way.machine, way.config, case.fields, way.words))

    return ways


def _one_request(case: _Case) -> Iterator[Advice]:
    if (case.config.max_running_requests or 1) > 1:
        yield case.changed(max_running_requests=1, **_tokens(case.config, requests=1))


def _smallest(fits: Callable[[int], bool]) -> int | None:
    """The least number of GiB from which on it fits."""
    most_refused = largest(0, _MOST_GIB, lambda gib: not fits(gib))
    if most_refused is None or most_refused == _MOST_GIB:
        return None
    return most_refused + 1


# By what they cost.
_POLICIES: tuple[_Policy, ...] = (
    _what_binds,
    _smaller_cache,
    _smaller_total,
    _fewer_requests,
    _fewer_tokens,
    _after(_smaller_cache, _fewer_requests),
    _after(_smaller_cache, _fewer_tokens),
    _after(_one_request, _fewer_tokens),
    _all_open,
    _trunk_on_cpu,
    _after(_smaller_cache, _trunk_on_cpu),
    _smaller_experts,
    _after(_smaller_cache, _smaller_experts),
    _after(_one_request, _smaller_experts),
    _after(_trunk_on_cpu, _smaller_experts),
    _after(_smaller_experts, _more_ram),
    _more_ram,
    _more_vram,
    _after(_after(_trunk_on_cpu, _smaller_experts), _more_ram),
    _after(_trunk_on_cpu, _more_ram),
)
