"""Hybrid decode: the same results wherever experts are, deferral as its schedule says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.hybrid_cases import (
    CPU,
    NativeCompute,
    forward,
    make_gpu_experts,
    make_layer,
    rounding,
    routing,
    to_cpu,
    to_gpu,
)
from tests.kernels.test_experts import EXPERTS, HIDDEN, TOP_K

from proa.core.errors import ConfigError
from proa.moe.deferral import DeferralPlan, split_slots
from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertArena
from proa.moe.hybrid import HybridDecode, HybridShared
from proa.moe.mover import ExpertMover, ExpertPlaces
from proa.moe.placement import ExpertBudget, place
from proa.moe.rebalance import RebalanceSpec, apply_swaps, propose_swaps
from proa.moe.router import TopK
from proa.moe.strategies import ByTokens
from proa.moe.strategy import LayerContext
from proa.native import _C

LAYERS, MAX_TOKENS = 4, 8


@pytest.fixture(params=["memory", "host_function"])
def worker(request, driver, pool):
    worker = _C.StreamWorker(driver, pool, hand_over=request.param, max_jobs=64)
    yield worker
    worker.close()


def make_strategies(worker, driver, pool, deferred=0, fmt="int4_g32"):
    shared = HybridShared.create(worker, DeferralPlan.create(LAYERS, TOP_K, deferred), CPU, MAX_TOKENS, HIDDEN, TOP_K)
    compute = NativeCompute(pool, fmt)
    arena = ExpertArena(CPU, sum(compute.sizes), LAYERS * EXPERTS)
    layers = [make_layer(pool, seed, fmt) for seed in range(LAYERS)]
    gpus = [make_gpu_experts(driver, compute, 0, arena) for _ in range(LAYERS)]
    strategies = []
    for i in range(LAYERS):
        strategies.append(HybridDecode(i, layers[i], gpus[i], shared, strategies[-1] if strategies else None))
    return layers, gpus, strategies


def run(strategies, xs, topks, *, defers=False):
    outs = []
    for i, (strategy, x, topk) in enumerate(zip(strategies, xs, topks, strict=True)):
        ctx = LayerContext(i, torch.full_like(x, float("nan")), defers)
        strategy.submit(x, topk, ctx)
        strategy.finish(x, topk, ctx)
        outs.append(ctx.out)
    return outs


def make_inputs(tokens, seed=0):
    rng = np.random.default_rng(seed)
    xs = [torch.from_numpy(rng.standard_normal((tokens, HIDDEN), np.float32)) for _ in range(LAYERS)]
    return xs, [routing(tokens, rng) for _ in range(LAYERS)]


@pytest.mark.parametrize("on_gpu", [(), (1, 4), tuple(range(EXPERTS))], ids=["none", "some", "all"])
def test_results_do_not_depend_on_where_experts_are(worker, driver, pool, on_gpu):
    layers, gpus, strategies = make_strategies(worker, driver, pool)
    cases = [make_inputs(tokens, seed=tokens) for tokens in (1, 3, 8)]
    expected = [
        [
            (forward(layer, x, t.ids, t.weights), rounding(layer, x, t))
            for layer, x, t in zip(layers, *case, strict=True)
        ]
        for case in cases
    ]
    for layer, gpu in zip(layers, gpus, strict=True):
        for expert in on_gpu:
            to_gpu(layer, gpu, expert)
        assert gpu.experts == list(on_gpu)
    for case, results in zip(cases, expected, strict=True):
        for got, (want, bound) in zip(run(strategies, *case), results, strict=True):
            if len(on_gpu) in {0, EXPERTS}:
                assert torch.equal(got, want)
            else:
                assert ((got - want).abs() <= bound).all()
    assert worker.faults == 0


def test_experts_move_back_and_forth_and_compute_the_same(worker, driver, pool):
    layers, gpus, strategies = make_strategies(worker, driver, pool)
    case = make_inputs(2)
    expected = run(strategies, *case)
    bounds = [rounding(layer, *inputs) for layer, *inputs in zip(layers, *case, strict=True)]
    nbytes = [layer.nbytes for layer in layers]
    rng = np.random.default_rng(5)
    for _ in range(100):
        layer, expert = int(rng.integers(LAYERS)), int(rng.integers(EXPERTS))
        (to_cpu if expert in gpus[layer].experts else to_gpu)(layers[layer], gpus[layer], expert)
    for layer, gpu, size in zip(layers, gpus, nbytes, strict=True):
        assert layer.nbytes == size - len(gpu.experts) * layer.bytes_per_expert
        assert [e for e in range(EXPERTS) if layer.is_loaded(e)] == [e for e in range(EXPERTS) if e not in gpu.experts]
    for got, want, bound in zip(run(strategies, *case), expected, bounds, strict=True):
        assert ((got - want).abs() <= bound).all()
    for layer, gpu in zip(layers, gpus, strict=True):
        for expert in gpu.experts:
            to_cpu(layer, gpu, expert)
    for got, want in zip(run(strategies, *case), expected, strict=True):
        assert torch.equal(got, want)


def late_slots(weights, ids, on_gpu, count):
    """Straight from the rule, slot by slot."""
    late = np.zeros(ids.shape, bool)
    for t in range(len(ids)):
        by_weight = sorted(range(ids.shape[1]), key=lambda s: (-weights[t, s], s))
        for slot in by_weight[len(by_weight) - count :]:
            late[t, slot] = int(ids[t, slot]) not in on_gpu
    return late


@pytest.mark.parametrize("deferred", [1, TOP_K - 1])
@pytest.mark.parametrize("on_gpu", [(), (0, 3)], ids=["none", "some"])
def test_deferral_follows_its_schedule(worker, driver, pool, deferred, on_gpu):
    layers, gpus, strategies = make_strategies(worker, driver, pool, deferred)
    xs, topks = make_inputs(5, seed=7)
    expected, carried = [], None
    for i, (layer, x, topk) in enumerate(zip(layers, xs, topks, strict=True)):
        count = deferred if i < LAYERS - 1 else 0
        late = torch.from_numpy(late_slots(topk.weights.numpy(), topk.ids.numpy(), on_gpu, count))
        gpu_slot = torch.isin(topk.ids, torch.tensor(on_gpu, dtype=torch.int32))
        halves = [topk.ids.masked_fill(~mask, -1) for mask in (gpu_slot, ~gpu_slot & ~late, late)]
        gpu, now, later = (forward(layer, x, ids.contiguous(), topk.weights) for ids in halves)
        total = gpu + now
        expected.append(total if carried is None else total + carried)
        carried = later if count else None
    assert carried is None
    for layer, gpu_experts in zip(layers, gpus, strict=True):
        for expert in on_gpu:
            to_gpu(layer, gpu_experts, expert)
    for _ in range(2):  # nothing is left over from a forward
        for got, want in zip(run(strategies, xs, topks, defers=True), expected, strict=True):
            assert torch.equal(got, want)
    in_time = run(strategies, xs, topks)  # a forward that does not defer, between two that do
    assert not torch.equal(in_time[0], expected[0])
    for got, want in zip(run(strategies, xs, topks, defers=True), expected, strict=True):
        assert torch.equal(got, want)
    late = [late_slots(t.weights.numpy(), t.ids.numpy(), on_gpu, deferred).sum() for t in topks[:-1]]
    assert sum(strategy.num_late for strategy in strategies) == 3 * sum(late)
    for strategy, topk in zip(strategies, topks, strict=True):  # late ones are the CPU's too; one of four did not defer
        assert strategy.slots == (4 * topk.ids.numel(), 4 * int(torch.isin(topk.ids, torch.tensor(on_gpu)).sum()))
    assert worker.faults == 0


def test_plans_of_deferral():
    assert DeferralPlan.create(4, 8, 2).deferred == (2, 2, 2, 0)
    assert DeferralPlan.create(1, 8, 2).deferred == (0,)
    assert DeferralPlan.create(3, 8, 0).deferred == (0, 0, 0)
    for wrong in (-1, 8):
        with pytest.raises(ConfigError, match="deferred"):
            DeferralPlan.create(4, 8, wrong)


def test_of_equal_weights_the_later_slot_is_late():
    topk = TopK(torch.tensor([[4, 2, 5]], dtype=torch.int32), torch.tensor([[0.5, 0.25, 0.25]]))
    now, late = split_slots(topk, 1, torch.full((6, 3), -1, dtype=torch.int64))
    assert now.tolist() == [[4, 2, -1]] and late.tolist() == [[-1, -1, 5]]


def test_slots_run_out_with_a_message():
    arena = ExpertArena(CPU, 64, 1)
    start = arena.take()
    with pytest.raises(ConfigError, match="free slot"):
        arena.take()
    arena.give_back(start)
    assert arena.num_free == 1


class Recorder:
    def __init__(self):
        self.calls = []

    def submit(self, x, topk, ctx):
        self.calls.append(("submit", x.shape[0]))

    def finish(self, x, topk, ctx):
        self.calls.append(("finish", x.shape[0]))


def test_few_tokens_are_handed_over_and_many_waited_for():
    few, many = Recorder(), Recorder()
    strategy = ByTokens(few, many, 4)
    assert strategy.is_capturable
    for tokens in (1, 4, 5):
        strategy.submit(torch.empty(tokens, 2), None, None)
        strategy.finish(torch.empty(tokens, 2), None, None)
    assert few.calls == [("submit", 1), ("finish", 1), ("submit", 4), ("finish", 4)]
    assert many.calls == [("submit", 5), ("finish", 5)]


def test_an_exchange_masks_experts_of_the_gpu():
    exchange = ExpertExchange(CPU, 4, 8, 2)
    table = torch.full((3, 3), -1, dtype=torch.int64)
    table[1] = 0
    ids = torch.tensor([[0, 1], [-1, 2]], dtype=torch.int32)
    exchange.give(torch.ones(2, 8), TopK(ids, torch.ones(2, 2)), table)
    assert exchange.ids[:2].tolist() == [[0, -1], [-1, 2]]
    assert exchange.tokens.tolist() == [2]


def test_swaps_are_switched_together_and_compute_the_same(worker, driver, pool):
    """100 updates that follow random routing, across layers; before each switch and after it results are the same."""
    layers, gpus, strategies = make_strategies(worker, driver, pool)
    case = make_inputs(3)
    expected = run(strategies, *case)
    bounds = [rounding(layer, *inputs) for layer, *inputs in zip(layers, *case, strict=True)]
    placement = place("uniform", ExpertBudget(LAYERS, EXPERTS, LAYERS * 2))
    for i, (layer, gpu) in enumerate(zip(layers, gpus, strict=True)):
        for expert in placement.gpu_experts(i):
            to_gpu(layer, gpu, expert)
    mover = ExpertMover([ExpertPlaces(*pair) for pair in zip(layers, gpus, strict=True)], CPU)
    rng, moved = np.random.default_rng(3), 0
    for update in range(100):
        swaps = propose_swaps(placement, rng.random((LAYERS, EXPERTS)), RebalanceSpec(max_swaps=3))
        mover.start(swaps)
        assert mover.busy == bool(swaps)
        if update % 10 == 0:
            for got, want, bound in zip(run(strategies, *case), expected, bounds, strict=True):
                assert ((got - want).abs() <= bound).all()
        assert list(mover.poll()) == swaps and not mover.busy
        placement = apply_swaps(placement, swaps)
        moved += len(swaps)
        for i, (layer, gpu) in enumerate(zip(layers, gpus, strict=True)):
            assert gpu.experts == placement.gpu_experts(i)
            assert [e for e in range(EXPERTS) if layer.is_loaded(e)] == placement.cpu_experts(i)
    assert moved > 100
    for got, want, bound in zip(run(strategies, *case), expected, bounds, strict=True):
        assert ((got - want).abs() <= bound).all()
    assert worker.faults == 0
