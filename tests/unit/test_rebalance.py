"""Swaps follow routing, and come to rest; a simulated model on a skewed, drifting trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.moe.placement import ExpertBudget, Placement, place
from proa.moe.rebalance import RebalanceSpec, apply_swaps, propose_swaps
from proa.moe.stats import MovingAverage

LAYERS, EXPERTS, TOP_K = 8, 128, 8


@st.composite
def cases(draw):
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    budget = ExpertBudget(layers, experts, draw(st.integers(0, layers * experts)))
    size = layers * experts
    shares = np.array(draw(st.lists(st.floats(0, 8), min_size=size, max_size=size))).reshape(layers, experts)
    spec = RebalanceSpec(draw(st.floats(0, 1)), draw(st.floats(0, 0.1)), draw(st.integers(0, 5)))
    return place("random", budget), shares, spec


@settings(max_examples=50, deadline=None)
@given(cases())
def test_swaps_keep_the_budget_gain_and_end(case):
    placement, shares, spec = case
    for _ in range(placement.on_gpu.size + 1):
        swaps = propose_swaps(placement, shares, spec)
        assert len(swaps) <= spec.max_swaps
        for swap in swaps:
            assert not placement.on_gpu[swap.in_layer, swap.in_expert]
            assert placement.on_gpu[swap.out_layer, swap.out_expert]
            use, old = shares[swap.in_layer, swap.in_expert], shares[swap.out_layer, swap.out_expert]
            assert use > old * (1 + spec.margin) + spec.floor
        after = apply_swaps(placement, swaps)
        assert after.num_gpu_experts == placement.num_gpu_experts
        if not swaps:
            return
        placement = after
    pytest.fail("swaps never end")


def test_budget_moves_to_the_layer_that_is_more_skewed():
    placement = Placement(np.array([[True, True, False, False], [False, False, False, False]]))
    shares = np.array([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0]])
    after = apply_swaps(placement, propose_swaps(placement, shares, RebalanceSpec()))
    assert after.gpu_experts(0) == []
    assert after.gpu_experts(1) == [2, 3]


def test_experts_leave_where_ram_has_a_slot():
    placement = Placement(np.array([[True, True, False, False], [True, False, False, False]]))
    shares = np.array([[0.0, 0.1, 0.9, 0.8], [0.2, 0.7, 0.0, 0.0]])
    left = {
        slots: [
            (s.out_layer, s.out_expert) for s in propose_swaps(placement, shares, RebalanceSpec(), ram_slots=slots_of)
        ]
        for slots, slots_of in (("two", np.array([2, 2])), ("one", np.array([1, 1])), ("none", np.array([0, 1])))
    }
    assert left == {"two": [(0, 0), (0, 1), (1, 0)], "one": [(0, 0), (1, 0)], "none": [(1, 0)]}


def test_experts_of_about_the_same_use_stay():
    placement = place("uniform", ExpertBudget(1, 4, 2))
    assert propose_swaps(placement, np.array([[1.0, 1.0, 1.2, 1.2]]), RebalanceSpec(margin=0.25)) == []
    assert len(propose_swaps(placement, np.array([[1.0, 1.0, 1.2, 1.3]]), RebalanceSpec(margin=0.25))) == 1


def zipf_trace(rng, exponent):
    """Probabilities `[layers, experts]`, p(rank) ~ rank**-exponent, ranks in a random order in each layer."""
    p = np.arange(1, EXPERTS + 1) ** -exponent
    return np.stack([rng.permutation(p / p.sum()) for _ in range(LAYERS)])


def route(rng, probabilities, tokens):
    """Counts of `tokens` tokens, TOP_K distinct experts each (Gumbel top-k)."""
    scores = np.log(probabilities)[None] + rng.gumbel(size=(tokens, *probabilities.shape))
    ids = np.argpartition(-scores, TOP_K, axis=2)[:, :, :TOP_K]
    return np.stack([np.bincount(ids[:, layer].reshape(-1), minlength=EXPERTS) for layer in range(LAYERS)])


def tokens_per_second(hit_ratio, gpu_share=0.15):
    """Of a decode step that waits for the CPU: its experts take time in proportion, the GPU's part is fixed."""
    return 1.0 / (gpu_share + (1.0 - gpu_share) * (1.0 - hit_ratio))


def test_following_the_routing_beats_uniform_by_a_quarter():
    """10 % of the experts on the GPU, Zipf 0.8 routing that changes halfway: modelled decode speed over uniform."""
    rng = np.random.default_rng(1)
    budget = ExpertBudget.ratio(LAYERS, EXPERTS, 0.1)
    uniform = placement = place("uniform", budget)
    average, spec = MovingAverage(LAYERS, EXPERTS, TOP_K, half_life=256), RebalanceSpec()
    speeds, moved = [], []
    for phase in range(2):
        probabilities = zipf_trace(rng, 0.8)
        for _ in range(60):
            counts = route(rng, probabilities, 32)
            speeds.append([tokens_per_second(p.hit_ratio(counts)) for p in (uniform, placement)])
            average.add(counts)
            swaps = propose_swaps(placement, average.shares, spec)
            moved.append(len(swaps))
            placement = apply_swaps(placement, swaps)
        settled = np.mean(speeds[-20:], axis=0)
        assert settled[1] / settled[0] >= 1.24, phase
        assert np.mean(moved[-20:]) <= 4  # of 102: hysteresis keeps noise from moving experts
    total = np.mean(speeds, axis=0)
    assert total[1] / total[0] >= 1.24  # the time to learn included
