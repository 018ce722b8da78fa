"""route against the routers of transformers, its tie rule, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.native import _C

EPS = 2.0**-24


def route(pool: _C.ThreadPool, logits: np.ndarray, top_k: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((logits.shape[0], top_k), -9, np.int32)
    weights = np.full((logits.shape[0], top_k), np.nan, np.float32)
    _C.route(pool, logits, ids, weights, **options)
    return ids, weights


def identity_router(router: torch.nn.Module, num_experts: int) -> torch.nn.Module:
    """The router with logits equal to its input."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    return router


def assert_same(
    ids: np.ndarray, weights: np.ndarray, expected_weights: torch.Tensor, expected_ids: torch.Tensor
) -> None:
    """Same experts; weights within 16 roundings, for sums and exponentials taken in another way."""
    order = expected_ids.argsort(dim=-1)
    mine = ids.argsort(axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(ids, mine, -1), expected_ids.gather(-1, order).numpy())
    theirs = expected_weights.gather(-1, order).detach().numpy()
    np.testing.assert_allclose(np.take_along_axis(weights, mine, -1), theirs, rtol=16 * EPS, atol=0)


@pytest.mark.parametrize("family,renormalize", [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)])
def test_softmax_routers(pool: _C.ThreadPool, family: str, renormalize: bool) -> None:
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    if family == "mixtral":
        router = MixtralTopKRouter(MixtralConfig(num_local_experts=16, num_experts_per_tok=4, hidden_size=16))
    else:
        config = Qwen3MoeConfig(num_experts=16, num_experts_per_tok=4, hidden_size=16, norm_topk_prob=renormalize)
        router = Qwen3MoeTopKRouter(config)
    logits = torch.randn(50, 16) * 3
    _, expected_weights, expected_ids = identity_router(router, 16)(logits)
    assert_same(*route(pool, logits.numpy(), 4, renormalize=renormalize), expected_weights, expected_ids)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("groups,top_groups", [(1, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_sigmoid_routers(pool: _C.ThreadPool, family: str, groups: int, top_groups: int, renormalize: bool) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    options = {
        "num_experts_per_tok": 6,
        "hidden_size": 32,
        "n_group": groups,
        "topk_group": top_groups,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": renormalize,
        "n_routed_experts": 32,
    }
    deepseek = family == "deepseek_v3"
    router = (
        DeepseekV3TopkRouter(DeepseekV3Config(**options)) if deepseek else Glm4MoeTopkRouter(Glm4MoeConfig(**options))
    )
    router.e_score_correction_bias = torch.randn(32) * 0.2
    logits = torch.randn(50, 32)
    _, expected_weights, expected_ids = identity_router(router, 32)(logits)
    mine = route(
        pool,
        logits.numpy(),
        6,
        bias=router.e_score_correction_bias.numpy(),
        score="sigmoid",
        num_groups=groups,
        top_groups=top_groups,
        renormalize=renormalize,
        eps=1e-20,
        scale=2.5,
    )
    assert_same(*mine, expected_weights, expected_ids)


def test_ties_go_to_the_lower_index_and_rows_are_independent(pool: _C.ThreadPool) -> None:
    @settings(max_examples=50, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        experts = data.draw(st.integers(1, 40))
        top_k = data.draw(st.integers(1, experts))
        row = st.lists(st.integers(0, 3), min_size=experts, max_size=experts)
        logits = np.array(data.draw(st.lists(row, min_size=1, max_size=5)), np.float32)
        ids, weights = route(pool, logits, top_k)
        np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :top_k])
        assert_same_one_by_one(pool, logits, ids, weights)

    check()


def assert_same_one_by_one(
    pool: _C.ThreadPool, logits: np.ndarray, ids: np.ndarray, weights: np.ndarray, **options: Any
) -> None:
    """Every token has the same bits when it is routed alone."""
    for row in range(len(logits)):
        alone = route(pool, logits[row : row + 1], ids.shape[1], **options)
        np.testing.assert_array_equal(alone[0][0], ids[row])
        np.testing.assert_array_equal(alone[1][0], weights[row])


def test_many_tokens_are_spread_over_threads(crowd: _C.ThreadPool) -> None:
    logits = np.random.default_rng(0).standard_normal((300, 64), np.float32)
    options: dict[str, Any] = {"score": "sigmoid", "num_groups": 8, "top_groups": 3, "scale": 2.5}
    ids, weights = route(crowd, logits, 6, **options)
    assert_same_one_by_one(crowd, logits, ids, weights, **options)


def test_counts_grow_by_the_tokens_of_each_expert(crowd: _C.ThreadPool) -> None:
    logits = np.random.default_rng(0).standard_normal((300, 16), np.float32)
    counts = np.full(16, 5, np.int64)
    ids, _ = route(crowd, logits, 3, counts=counts)
    np.testing.assert_array_equal(counts - 5, np.bincount(ids.reshape(-1), minlength=16))
    route(crowd, logits[:1], 3, counts=counts)
    assert counts.sum() == 16 * 5 + 3 * 301


def test_extreme_logits_stay_finite(pool: _C.ThreadPool) -> None:
    for score in ("softmax", "sigmoid"):
        _, weights = route(pool, np.array([[1e30, -1e30, 88.8, 0]], np.float32), 4, score=score)
        assert np.isfinite(weights).all() and abs(weights.sum() - 1) < 8 * EPS


REFUSALS = [
    ({"logits": np.ones((2, 8), np.float64)}, TypeError),
    ({"ids": np.ones((2, 2), np.int64)}, TypeError),
    ({"ids": np.ones((3, 2), np.int32)}, ValueError),
    ({"weights": np.ones((2, 3), np.float32)}, ValueError),
    ({"bias": np.ones(7, np.float32)}, ValueError),
    ({"counts": np.ones(7, np.int64)}, ValueError),
    ({"counts": np.ones(8, np.int32)}, TypeError),
    ({"ids": np.ones((2, 9), np.int32), "weights": np.ones((2, 9), np.float32)}, ValueError),
    ({"ids": np.ones((2, 0), np.int32), "weights": np.ones((2, 0), np.float32)}, ValueError),
    ({"score": "tanh"}, ValueError),
    ({"num_groups": 3}, ValueError),
    ({"num_groups": 0}, ValueError),
    ({"num_groups": 4, "top_groups": 5}, ValueError),
    ({"num_groups": 8, "top_groups": 2}, ValueError),
    ({"eps": float("nan")}, ValueError),
]


@pytest.mark.parametrize("change,error", REFUSALS)
def test_route_refuses(pool: _C.ThreadPool, change: dict[str, Any], error: type[Exception]) -> None:
    good: dict[str, Any] = {
        "logits": np.ones((2, 8), np.float32),
        "ids": np.ones((2, 2), np.int32),
        "weights": np.ones((2, 2), np.float32),
    }
    _C.route(pool, **good)
    with pytest.raises(error, match=r"\[route\] expected .*, got "):
        _C.route(pool, **(good | change))
