"""Models of every family give the same answers wherever their experts are, and while these change places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.fake_cuda import build_fake_driver
from tests.models.conftest import MAX_TOKENS
from tests.models.hybrid_models import load_hybrid
from tests.models.paging import Pager
from tests.models.test_gpu_trunk import greedy
from tests.models.test_oracle import tokens
from tests.models.variants import VARIANTS

from proa.device.gpu import GpuDevice
from proa.kernels import reference
from proa.models import ExpertPlan, inspect
from proa.moe.placement import ExpertBudget, place
from proa.weights.checkpoint import Checkpoint

# A family each, float32 or exact weights: greedy tokens are the same up to sums in another order.
NAMES = ("deepseek_groups_yarn", "glm_norm_bias", "qwen3", "mixtral_tied", "deepseek_halves")
PROMPT, ANSWER = 24, 16


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def device(runtime):
    return GpuDevice(runtime, torch.device("cpu"), reference, few_tokens=MAX_TOKENS)


def case_of(make_case, name):
    return make_case(next(v for v in VARIANTS if v.name == name), "trunk")


def plan_of(path, share, **fields):
    info = inspect(Checkpoint.open(path)).experts
    budget = ExpertBudget.ratio(info.layers, info.experts, share)
    return ExpertPlan(place("random", budget).on_gpu, **fields)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("share", "stream_from"), [(0.0, None), (0.4, None), (1.0, None), (0.0, 20), (0.4, 20)])
def test_greedy_tokens_wherever_experts_are(name, share, stream_from, make_case, device, driver, monkeypatch):
    case = case_of(make_case, name)
    plan = plan_of(case.path, share, stream_from=stream_from, ring_bytes=1 << 20)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    ids = tokens()[:PROMPT]
    assert greedy(model, ids, ANSWER) == greedy(case.model, ids, ANSWER)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_while_experts_change_places(name, make_case, device, driver, monkeypatch):
    """More than 100 swaps, across layers, between the steps of an answer: its tokens, and every expert in one place."""
    case = case_of(make_case, name)
    plan = plan_of(case.path, 0.4, moves=3, ram_slots=2)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    usage = model.expert_usage
    updates = usage.updates
    rng = np.random.default_rng(0)
    ids = tokens()[:PROMPT]
    expected = greedy(case.model, ids, ANSWER)
    while updates.num_moved < 100:
        pager = Pager(model, num_blocks=8)
        sequence, found, chunk = pager.sequence(PROMPT + ANSWER), [], ids
        for _ in range(ANSWER):
            chunk = pager.forward([(sequence, chunk)], last_only=True)[-1:].argmax(-1).int()
            found.append(int(chunk))
            usage.after_step(1)
            updates.add(1000 * rng.random(updates.placement.on_gpu.shape))
        assert found == expected
    updates.poll()
    for layer, places in enumerate(updates._layers):
        assert places.gpu.experts == updates.placement.gpu_experts(layer)
        loaded = [e for e in range(places.cpu.num_experts) if places.cpu.is_loaded(e)]
        assert loaded == updates.placement.cpu_experts(layer)


def test_what_routing_prefers_comes_to_the_gpu(make_case, device, driver, monkeypatch):
    """Nothing but steps: counts of the routers alone bring the most used experts to the GPU."""
    case = case_of(make_case, "deepseek_groups_yarn")
    model = load_hybrid(monkeypatch, case.path, device, driver, plan_of(case.path, 0.25, moves=4, ram_slots=2))
    usage, pager, counts = model.expert_usage, Pager(model, num_blocks=64), 0
    usage.reset()
    usage.start_recording()
    before = usage.updates.placement
    for seed in range(12):
        ids = tokens(PROMPT, seed)
        pager.forward([(pager.sequence(PROMPT), ids)])
        usage.after_step(PROMPT)
    counts = usage.dump().counts
    assert counts.sum(axis=1).tolist() == [12 * PROMPT * 3] * 2
    after = usage.updates.placement
    best = place("frequency", ExpertBudget(*counts.shape, before.num_gpu_experts), type("S", (), {"counts": counts})())
    assert before.hit_ratio(counts) + 0.8 * (best.hit_ratio(counts) - before.hit_ratio(counts)) < after.hit_ratio(
        counts
    )
