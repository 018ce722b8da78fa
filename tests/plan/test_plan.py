"""What fits where, the advice when it does not, and the estimates beside measured rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.models import KIMI_K2

from proa.cli.flags import FLAGS
from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.solve import largest, solve
from proa.plan.advice import PLAN_FLAGS, cheapest_ways
from proa.plan.declared import declared_checkpoint
from proa.plan.estimate import DECODE_SHARE, STEP_S, estimate_decode, estimate_prefill
from proa.plan.hardware import GIB, Interval, Machine, Overrides, probe
from proa.plan.memory_plan import MemoryPlan, Wanted, plan_memory
from proa.plan.model_sizes import ModelSizes, sizes_of

PATH = Path("kimi")
KIMI = sizes_of(declared_checkpoint(KIMI_K2, PATH), "shapes")
# Four layers, and 0.1 of a GiB per expert layer in bf16: plans of all kinds within a few GiB.
SMALL = sizes_of(
    declared_checkpoint(
        KIMI_K2
        | {"num_hidden_layers": 4, "hidden_size": 1024, "n_routed_experts": 32, "moe_intermediate_size": 512}
        | {"vocab_size": 4096, "intermediate_size": 2048, "num_attention_heads": 8, "quantization_config": None},
        PATH,
    ),
    "shapes",
)


def asked(context: int | None = None, concurrency: int = 1) -> EngineConfig:
    return Wanted(context, concurrency).config_for(262144)


def texts(sizes: ModelSizes, machine: Machine, config: EngineConfig) -> list[str]:
    return [way.text(config, PLAN_FLAGS) for way in cheapest_ways(sizes, machine, config)]


def workstation(ram: float, vram: float = 0.0, **rates: object) -> Machine:
    return replace(Machine(int(ram * GIB), 500.0, int(vram * GIB)), **rates)


def holds(plan: MemoryPlan, machine: Machine) -> bool:
    return sum(plan.ram.values()) <= machine.ram_bytes and sum(plan.vram.values()) <= machine.vram_bytes


def test_kimi_on_a_workstation():
    machine = workstation(768, 96)
    plan = plan_memory(KIMI, machine, Wanted(131072, 4))
    assert plan.fits and plan.streams and holds(plan, machine)
    assert plan.vram["trunk"] == KIMI.gpu_trunk_bytes
    assert plan.vram["KV cache"] == 4 * 131072 * 70272
    assert plan.ram["routed experts"] + plan.vram["routed experts"] == KIMI.expert_bytes
    assert {flag for flag in plan.flags if flag.startswith("--")} <= {flag.name for flag in FLAGS}


def test_free_gpu_memory_is_for_experts():
    few, many = (plan_memory(KIMI, workstation(768, vram), Wanted(8192)) for vram in (80, 160))
    assert 0 < few.gpu_experts < many.gpu_experts < 60 * 384
    one_more = KIMI.bytes_per_expert
    for plan, vram in ((few, 80), (many, 160)):
        flexible = plan.vram["routed experts"] + plan.vram["KV cache"]
        left = vram * GIB - sum(plan.vram.values())
        assert 0.05 * flexible <= left < (flexible + 2 * one_more) / 0.95 - flexible
    everything = plan_memory(KIMI, workstation(64, 800), Wanted(8192))
    assert everything.gpu_experts == 60 * 384 and everything.ram["routed experts"] == 0


@pytest.mark.parametrize(("vram", "context", "concurrency"), [(32, 8192, 1), (48, 32768, 8), (96, 131072, 4)])
def test_an_engine_does_what_was_planned_for_it(vram, context, concurrency):
    """Row for row, on a GPU of that size."""
    machine = workstation(768, vram)
    plan = plan_memory(KIMI, machine, Wanted(context, concurrency))
    done = solve(plan.config, KIMI, machine.gpu, machine.ram_bytes)
    assert done.placed.on_gpu.sum() == plan.gpu_experts
    assert done.kv.num_tokens * plan.kv_token_bytes == plan.vram["KV cache"]
    assert done.kv.max_model_len == context and done.config == plan.config
    assert (done.vram, done.ram) == (plan.vram, plan.ram)
    for name, size in plan.vram.items():
        assert f"{name} {size / GIB:.2f}" in done.notes["gpu_memory"] or not size


def test_experts_on_the_gpu_may_be_what_makes_the_rest_fit():
    assert not plan_memory(KIMI, workstation(512, 36), Wanted(8192)).fits
    plan = plan_memory(KIMI, workstation(512, 80), Wanted(8192))
    assert plan.fits and holds(plan, workstation(512, 80))


def test_what_does_not_fit_says_why_and_how():
    machine, config = workstation(640, 32), asked(65536, 4)
    plan = plan_memory(KIMI, machine, config)
    assert not plan.fits and "GiB available" in plan.refusal
    assert texts(KIMI, machine, config) == [
        "--concurrency 1",
        "--context 27648",
        "--device cpu, everything in RAM",
    ]
    # Neither asks for more than it has to.
    assert plan_memory(KIMI, machine, Wanted(65536, 1)).fits and not plan_memory(KIMI, machine, Wanted(65536, 2)).fits
    assert plan_memory(KIMI, machine, Wanted(27648, 4)).fits and not plan_memory(KIMI, machine, Wanted(28672, 4)).fits


def test_smaller_experts_are_tried_from_the_best_format_on():
    bf16 = replace(
        KIMI, expert_bytes=2 * KIMI.expert_parameters, packed_bytes=KIMI.trunk_bytes + 2 * KIMI.expert_parameters
    )
    for ram, name in ((1200, "int8"), (700, "int4"), (500, "Q3_K"), (400, "Q2_K")):
        first, second, *_ = texts(bf16, workstation(ram), asked(8192))
        assert first.startswith(f"experts in {name}: ")
        assert second.endswith("more RAM")


@settings(max_examples=40, deadline=None)
@given(
    ram=st.floats(0.05, 4),
    vram=st.one_of(st.just(0.0), st.floats(0.05, 4)),
    context=st.integers(1, 65536),
    concurrency=st.integers(1, 64),
)
def test_advice_fits(ram, vram, context, concurrency):
    machine, wanted = workstation(ram, vram), asked(context, concurrency)
    plan = plan_memory(SMALL, machine, wanted)
    assert plan.fits == holds(plan, machine)
    if plan.fits:
        return
    ways = cheapest_ways(SMALL, machine, wanted)
    assert 1 <= len(ways) <= 3
    for way in ways:
        fitting = plan_memory(way.sizes, way.machine, way.config)
        assert fitting.fits and holds(fitting, way.machine)
        assert (way.sizes, way.machine, way.config) != (SMALL, machine, wanted)


def test_advice_asks_for_no_more_than_needed():
    machine, wanted = workstation(500), asked(8192)
    (way,) = [way for way in cheapest_ways(KIMI, machine, wanted, limit=8) if way.words.endswith("more RAM")]
    less = replace(way.machine, ram_bytes=way.machine.ram_bytes - GIB)
    assert not plan_memory(KIMI, less, wanted).fits


def test_decode_is_bytes_over_bandwidth():
    plan = plan_memory(KIMI, workstation(768), Wanted(16))
    found = estimate_decode(KIMI, plan, workstation(768))
    # 11.89 GB of experts, 10.4 billion weights of 2 bytes, and the cache.
    assert found.ram_bytes == pytest.approx(11.89e9 + 2 * 10.4e9, rel=1e-2)
    assert found.bound == found.range.high == pytest.approx(500e9 / found.ram_bytes)
    assert found.range.low == pytest.approx(1 / (1 / found.bound / DECODE_SHARE + STEP_S))
    alone, four = (
        estimate_decode(KIMI, plan_memory(KIMI, workstation(768), Wanted(16, n)), workstation(768)) for n in (1, 4)
    )
    # Few experts are shared, the trunk is read once.
    assert alone.bound < four.bound < 4 * alone.bound


def test_prefill_estimates_contain_what_was_measured():
    """60 layers on an H200, pinned copies at 51.7 GiB/s: 781 tokens/s at 8k, 3019 at 32k (benchmarks/LOG.md)."""
    rate = 51.7 * GIB / 1e9
    machine = workstation(1024, 80, pcie=Interval(rate, rate))
    for tokens, measured in ((8192, 781), (32768, 3019)):
        plan = replace(plan_memory(KIMI, machine, Wanted(tokens)), gpu_experts=0)
        assert plan.streams and plan.chunk == tokens
        found = estimate_prefill(KIMI, plan, machine)
        assert found.range.low <= measured <= found.range.high <= found.bound


def test_estimates_are_ordered():
    for machine in (workstation(768), workstation(768, 40), workstation(768, 96), workstation(64, 800)):
        plan = plan_memory(KIMI, machine, Wanted(16384, 2))
        for estimate in (estimate_decode, estimate_prefill):
            found = estimate(KIMI, plan, machine)
            assert 0 < found.range.low <= found.range.high <= found.bound * (1 + 1e-9)


def test_largest():
    assert largest(0, 100, lambda number: number <= 37) == 37
    assert largest(5, 5, lambda _: True) == 5
    assert largest(0, 9, lambda _: False) is None and largest(2, 1, lambda _: True) is None


@pytest.mark.parametrize(
    "flags", [{"vram": -1}, {"ram": 0}, {"ram": float("nan")}, {"bandwidth": 0}, {"pcie": float("inf")}]
)
def test_nonsense_flags(flags):
    with pytest.raises(ConfigError, match=rf"\[--{next(iter(flags))}\] expected a number in"):
        Overrides(**flags)


def test_nonsense_requests():
    for wanted, name in (((0, 1), "context"), ((1, 0), "concurrency"), ((1, 1025), "concurrency")):
        with pytest.raises(ConfigError, match=rf"\[--{name}\]"):
            Wanted(*wanted)
    with pytest.raises(ConfigError, match=r"\[--context\] expected at most 262144"):
        plan_memory(KIMI, workstation(768), Wanted(262145))


def test_told_hardware_is_not_measured():
    machine = probe(Overrides(vram=24, ram=64, bandwidth=100, pcie=20))
    assert (machine.vram_bytes, machine.ram_bytes, machine.read_gb_s) == (24 * GIB, 64 * GIB, 100)
    assert machine.pcie == Interval(20, 20) and machine.told == ("vram", "ram", "bandwidth", "pcie")
    assert machine.gpu is not None and probe(Overrides(vram=0, bandwidth=100)).gpu is None
