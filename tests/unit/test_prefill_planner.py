"""What plans of passes learn from the passes before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.test_prefill_plan import RATES, SIZE

from proa.moe.prefill_planner import PrefillPlanner

EXPERTS, TOP_K = 64, 4
NONE = np.zeros(EXPERTS, np.bool_)


def planner(layers=1, stream_all_from=None):
    return PrefillPlanner(
        RATES,
        SIZE,
        layers=layers,
        experts=EXPERTS,
        top_k=TOP_K,
        device=torch.device("cpu"),
        stream_all_from=stream_all_from,
    )


def routing(tokens, weights, seed=0):
    """Experts of tokens that choose them as often as `weights` say."""
    rng = np.random.default_rng(seed)
    keys = np.log(np.maximum(weights, 1e-9)) + rng.gumbel(size=(tokens, EXPERTS))
    return torch.from_numpy(np.argsort(-keys, axis=1)[:, :TOP_K].astype(np.int32))


def cpu_of(plans):
    return [set(plan.cpu) for plan in plans]


def test_experts_that_were_rare_go_to_the_cpu():
    plan = planner(layers=2)
    weights = np.ones(EXPERTS)
    weights[::4] = 0.01
    rare = set(range(0, EXPERTS, 4))
    assert cpu_of(plan.plans(2000, [NONE, NONE], [True, True]))[0] != rare
    plan.count(0, routing(2000, weights))
    (first, second) = cpu_of(plan.plans(2000, [NONE, NONE], [True, True]))
    assert rare <= first and not rare <= second


def test_what_was_long_ago_counts_little():
    plan = planner()
    early, late = np.ones(EXPERTS), np.ones(EXPERTS)
    early[:16], late[16:32] = 0.01, 0.01
    for weights, passes in ((early, 20), (late, 6)):
        for seed in range(passes):
            plan.plans(2000, [NONE], [True])
            plan.count(0, routing(2000, weights, seed))
    assert set(range(16, 32)) <= cpu_of(plan.plans(2000, [NONE], [True]))[0]


def test_no_expert_is_two_places_or_none():
    here = np.arange(EXPERTS) % 3 == 0
    (plan,) = planner().plans(1000, [here], [True])
    assert sorted(plan.streamed + plan.cpu) == np.flatnonzero(~here).tolist()
    (plan,) = planner().plans(30000, [here], [False])
    assert plan.streamed == () and plan.cpu == tuple(np.flatnonzero(~here).tolist())


def test_a_threshold_decides():
    plan = planner(stream_all_from=100)
    assert plan.plans(99, [NONE], [True])[0].streamed == ()
    assert plan.plans(100, [NONE], [True])[0].cpu == ()


def test_the_time_of_the_trunk_is_taken_from_the_cpu():
    plan = planner()
    before = plan.plans(2000, [NONE], [True])[0]
    plan.learn(2000, trunk_s=0.01, cpu_s=0.0, planned_cpu_s=0.0)
    after = plan.plans(2000, [NONE], [True])[0]
    assert len(after.cpu) < len(before.cpu)
    assert len(plan.plans(1000, [NONE], [True])[0].cpu) > len(after.cpu), "it is as long as the chunk"


@pytest.mark.parametrize("slow", [0.5, 1.0, 1.5, 100.0])
def test_a_cpu_that_is_not_as_fast_as_measured_gets_other_work_and_as_before_again(slow):
    plan = planner()
    start = plan.plans(2000, [NONE], [True])[0]
    scale = slow  # of what was measured
    for times, scale in ((8, slow), (60, 1.0)):
        now = plan.plans(2000, [NONE], [True])[0]
        measured = start.cpu_seconds / len(start.cpu)  # of an expert, all have as many tokens
        for _ in range(times):
            plan.learn(2000, trunk_s=0.0, cpu_s=scale * measured * len(now.cpu), planned_cpu_s=now.cpu_seconds)
            now = plan.plans(2000, [NONE], [True])[0]
        assert np.sign(len(start.cpu) - len(now.cpu)) == np.sign(scale - 1.0), "slower ones get less, faster ones more"
        if scale == 1.5:
            assert now.cpu_seconds == pytest.approx(1.5 * measured * len(now.cpu), rel=0.02)


def test_a_machine_that_slept_is_not_given_up_for_long():
    """One pass in which the CPU took a day, and one in which its clock stood still."""
    plan = planner()
    start = plan.plans(2000, [NONE], [True])[0]
    plan.learn(2000, trunk_s=0.0, cpu_s=86400.0, planned_cpu_s=start.cpu_seconds)
    for _ in range(30):
        now = plan.plans(2000, [NONE], [True])[0]
        plan.learn(2000, trunk_s=0.0, cpu_s=now.cpu_seconds and start.cpu_seconds, planned_cpu_s=now.cpu_seconds)
    assert len(now.cpu) > len(start.cpu) // 2
    for _ in range(100):
        plan.learn(2000, trunk_s=0.0, cpu_s=0.0, planned_cpu_s=1.0)
    measured = start.cpu_seconds / len(start.cpu)
    now = plan.plans(2000, [NONE], [True])[0]
    assert now.cpu_seconds >= 0.24 * measured * len(now.cpu)
