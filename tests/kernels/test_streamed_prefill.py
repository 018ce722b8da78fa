"""A pass of streamed experts: the same results whatever crosses, stays or is computed beside."""

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
    to_gpu,
)
from tests.kernels.test_experts import EXPERTS, HIDDEN, TOP_K

from proa.moe.exchange import ExpertExchange
from proa.moe.gpu_experts import ExpertArena
from proa.moe.prefill_plan import LayerPlan
from proa.moe.strategy import LayerContext
from proa.moe.stream import WeightStream, make_groups
from proa.moe.streamed_prefill import PrefillPass, StreamedPrefill
from proa.native import _C

LAYERS, TOKENS = 3, 40


@pytest.fixture
def worker(driver, pool):
    worker = _C.StreamWorker(driver, pool, max_jobs=16)
    yield worker
    worker.close()


class Model:
    """Layers with their strategies, and what each should compute."""

    def __init__(self, driver, worker, pool, part_experts, num_parts):
        self.compute = NativeCompute(pool, "int4_g32")
        expert_bytes = sum(self.compute.sizes)
        self.stream = WeightStream(CPU, driver, part_experts * expert_bytes, num_parts)
        self.stream.arena.fill_(255)
        self.shared = PrefillPass(self.stream, worker, ExpertExchange(CPU, TOKENS, HIDDEN, TOP_K), self.compute)
        self.layers = [make_layer(pool, seed) for seed in range(LAYERS)]
        arena = ExpertArena(CPU, expert_bytes, LAYERS * EXPERTS)
        self.gpus = [make_gpu_experts(driver, self.compute, 0, arena) for _ in range(LAYERS)]
        self.strategies = [StreamedPrefill(*pair, self.shared) for pair in zip(self.layers, self.gpus, strict=True)]
        rng = np.random.default_rng(0)
        self.xs = [torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN), np.float32)) for _ in range(LAYERS)]
        self.topks = [routing(TOKENS, rng) for _ in range(LAYERS)]
        cases = list(zip(self.layers, self.xs, self.topks, strict=True))
        self.expected = [forward(layer, x, topk.ids, topk.weights) for layer, x, topk in cases]
        self.bounds = [2 * rounding(*case) for case in cases]  # partial sums once more, group by group

    def run(self):
        for i in range(LAYERS):
            self.layer(i)
        assert self.stream.finished

    def layer(self, i):
        ctx = LayerContext(i, torch.full_like(self.xs[i], float("nan")))
        self.strategies[i].submit(self.xs[i], self.topks[i], ctx)
        self.strategies[i].finish(self.xs[i], self.topks[i], ctx)
        assert ((ctx.out - self.expected[i]).abs() <= self.bounds[i]).all()


@pytest.mark.parametrize(("part_experts", "num_parts"), [(1, 2), (2, 2), (2, 3), (4, 2), (6, 2)])
def test_results_do_not_depend_on_the_plan(driver, worker, pool, part_experts, num_parts):
    model = Model(driver, worker, pool, part_experts, num_parts)
    everything, nothing = tuple(range(EXPERTS)), ()
    for streamed in (everything, (0, 3, 5), nothing):
        cpu = tuple(e for e in everything if e not in streamed)
        model.shared.begin([LayerPlan(streamed, cpu, 0.0)] * LAYERS)
        model.run()
    for expert in (1, 4):
        to_gpu(model.layers[1], model.gpus[1], expert)
    plans = [LayerPlan(everything, (), 0.0), LayerPlan((0, 2), (3, 5), 0.0), LayerPlan((), everything, 0.0)]
    for _ in range(2):
        model.shared.begin(plans)
        model.run()
    assert worker.faults == 0


def test_a_pass_that_was_given_up_is_no_trace(driver, worker, pool):
    model = Model(driver, worker, pool, 2, 2)
    plans = [LayerPlan(tuple(range(EXPERTS)), (), 0.0)] * LAYERS
    model.shared.begin(plans)
    ctx = LayerContext(0, torch.empty_like(model.xs[0]))
    model.strategies[0].submit(model.xs[0], model.topks[0], ctx)
    model.shared.begin(plans)
    model.run()


def test_a_pass_goes_on_with_its_own_plan(driver, worker, pool):
    """Between its layers another one went through all of them, with the experts elsewhere."""
    model = Model(driver, worker, pool, 2, 2)
    everything = tuple(range(EXPERTS))
    on_cpu, streamed = [LayerPlan((), everything)] * LAYERS, [LayerPlan(everything, ())] * LAYERS
    for outer, inner in ((on_cpu, streamed), (streamed, on_cpu)):
        model.shared.begin(outer)
        model.layer(0)
        suspended = model.shared.suspend()
        model.shared.begin(inner)
        model.run()
        model.shared.resume(suspended)
        for i in range(1, LAYERS):
            model.layer(i)
        assert model.stream.finished


class Source:
    """Experts of 100 bytes on two nodes, expert e at 60 * slot and at 5000 + 40 * slot."""

    def __init__(self, nodes):
        self.nodes = nodes

    def blocks(self, expert):
        slot = (0, 1, 3, 2, 7)[expert]
        return [(1000 + 100 * slot, 100)] if self.nodes == 1 else [(60 * slot, 60), (5000 + 40 * slot, 40)]


def test_adjacent_experts_cross_in_one_copy():
    groups = make_groups(7, Source(1), (4, 2, 0, 1, 3), 4)
    assert [(g.layer, g.experts, g.starts) for g in groups] == [(7, (0, 1, 3, 2), (0, 100, 200, 300)), (7, (4,), (0,))]
    assert [g.copies for g in groups] == [((1000, 0, 400),), ((1700, 0, 100),)]
    assert groups[0].nbytes == 400


def test_experts_of_two_nodes_are_put_together():
    (group,) = make_groups(0, Source(2), (1, 0), 4)
    assert group.copies == ((0, 0, 60), (5000, 60, 40), (60, 100, 60), (5040, 160, 40))
