"""Placement policies: every expert in one place, the budget kept, the same result every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.core.errors import ConfigError
from proa.moe.placement import POLICIES, ExpertBudget, Placement, place
from proa.moe.stats import ExpertStats


@st.composite
def budgets(draw):
    layers, experts = draw(st.integers(1, 9)), draw(st.integers(1, 17))
    return ExpertBudget(layers, experts, draw(st.integers(0, layers * experts)))


@st.composite
def budgets_with_stats(draw):
    budget = draw(budgets())
    size = budget.num_layers * budget.num_experts
    counts = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    return budget, ExpertStats(np.array(counts, np.float64).reshape(budget.num_layers, budget.num_experts))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), budgets_with_stats())
def test_exactly_the_budget_in_one_place_each_time(policy, case):
    budget, stats = case
    placement = place(policy, budget, stats)
    assert placement.on_gpu.shape == (budget.num_layers, budget.num_experts)
    assert placement.num_gpu_experts == budget.gpu_experts
    for layer in range(budget.num_layers):
        both = placement.gpu_experts(layer) + placement.cpu_experts(layer)
        assert sorted(both) == list(range(budget.num_experts))
    assert np.array_equal(placement.on_gpu, place(policy, budget, stats).on_gpu)


@settings(max_examples=40, deadline=None)
@given(budgets_with_stats())
def test_no_placement_of_the_same_size_hits_more_than_frequency(case):
    budget, stats = case
    best = np.sort(stats.counts.reshape(-1))[::-1][: budget.gpu_experts].sum()
    placement = place("frequency", budget, stats)
    assert stats.counts[placement.on_gpu].sum() == best
    assert np.array_equal(placement.on_gpu, place("auto", budget, stats).on_gpu)


@settings(max_examples=40, deadline=None)
@given(budgets())
def test_shapes_of_the_policies_without_counts(budget):
    per_layer = place("uniform", budget).on_gpu.sum(axis=1)
    assert per_layer.max() - per_layer.min() <= 1
    assert all(place("uniform", budget).gpu_experts(i) == list(range(n)) for i, n in enumerate(per_layer))
    assert place("front-loading", budget).on_gpu.reshape(-1)[: budget.gpu_experts].all()
    assert np.array_equal(place("auto", budget).on_gpu, place("uniform", budget).on_gpu)


def test_random_differs_from_the_ordered_policies():
    budget = ExpertBudget(8, 64, 100)
    chosen = place("random", budget).on_gpu
    assert not np.array_equal(chosen, place("uniform", budget).on_gpu)
    assert (chosen.sum(axis=1) > 0).all()


def test_equal_counts_go_to_the_earlier_expert():
    placement = place("frequency", ExpertBudget(2, 3, 2), ExpertStats(np.ones((2, 3))))
    assert placement.gpu_experts(0) == [0, 1]


def test_hit_ratio_is_the_share_of_tokens():
    placement = Placement(np.array([[True, False], [False, True]]))
    assert placement.hit_ratio(np.array([[3.0, 1.0], [2.0, 4.0]])) == 0.7
    assert placement.hit_ratio(np.zeros((2, 2))) == 0.0


def test_budgets_from_flags():
    assert ExpertBudget.per_layer(60, 384, 8).gpu_experts == 480
    assert ExpertBudget.ratio(60, 384, 0.1).gpu_experts == 2304


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ExpertBudget.per_layer(60, 384, 385), "kt-num-gpu-experts"),
        (lambda: ExpertBudget.ratio(60, 384, 1.5), "kt-gpu-experts-ratio"),
        (lambda: ExpertBudget.ratio(60, 384, float("nan")), "kt-gpu-experts-ratio"),
        (lambda: ExpertBudget(2, 2, 5), "0 to 4"),
        (lambda: place("best", ExpertBudget(2, 2, 1)), "'best'"),
        (lambda: place("frequency", ExpertBudget(2, 2, 1)), "routing counts"),
        (lambda: place("frequency", ExpertBudget(2, 2, 1), ExpertStats(np.ones((2, 3)))), "2 x 2"),
    ],
)
def test_wrong_flags_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_placements_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        place("uniform", ExpertBudget(1, 2, 1)).on_gpu[0, 1] = True
