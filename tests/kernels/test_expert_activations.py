"""Activations and biases of ExpertLayer against float64 formulas in torch and transformers' gpt-oss experts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from proa.layers.mlp import Activation
from proa.native import _C
from proa.weights.raw_linear import RawLinear

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 96, 160, 5, 3, 50
EPS = 2.0**-24
ACTIVATIONS = [
    Activation(),
    Activation(limit=0.5),
    Activation("swigluoai", limit=7.0, alpha=1.702),
    Activation("swigluoai", limit=0.5, alpha=1.702),
]


class Case:
    """Random float32 experts with a batch; `bias`: whether linears have one."""

    def __init__(self, seed: int, *, bias: bool) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        shapes = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
        self.weights = [[normal(*shape) / np.float32(math.sqrt(shape[1])) for shape in shapes] for _ in range(EXPERTS)]
        self.biases = [[normal(shape[0]) if bias else None for shape in shapes] for _ in range(EXPERTS)]
        self.x = normal(TOKENS, HIDDEN)
        self.ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
        self.routing = rng.random((TOKENS, TOP_K), np.float32)

    def layer(self, pool: _C.ThreadPool, activation: Activation) -> _C.ExpertLayer:
        workspace = _C.ExpertWorkspace(pool, TOKENS)
        layer = _C.ExpertLayer(
            workspace,
            EXPERTS,
            HIDDEN,
            INTERMEDIATE,
            "f32",
            activation=activation.gating,
            max_top_k=TOP_K,
            limit=activation.limit,
            alpha=activation.alpha,
            bias=self.biases[0][0] is not None,
        )
        for expert, (weights, biases) in enumerate(zip(self.weights, self.biases, strict=True)):
            layer.load(
                expert, *(RawLinear("f32", *w.shape, w, None, bias=b) for w, b in zip(weights, biases, strict=True))
            )
        return layer

    def forward(self, pool: _C.ThreadPool, activation: Activation) -> np.ndarray:
        out = np.full_like(self.x, np.nan)
        self.layer(pool, activation).forward(self.x, self.ids, self.routing, out)
        return out

    def exact(self, activation: Activation) -> torch.Tensor:
        """The formula in float64, one token and slot after the other."""
        out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
        for token, slot in np.ndindex(TOKENS, TOP_K):
            expert = self.ids[token, slot]
            gate, up, down = (torch.from_numpy(w).double() for w in self.weights[expert])
            biases = [0.0 if b is None else torch.from_numpy(b).double() for b in self.biases[expert]]
            x = torch.from_numpy(self.x[token]).double()
            g = (gate @ x + biases[0]).clamp(max=activation.limit)
            u = (up @ x + biases[1]).clamp(-activation.limit, activation.limit)
            if activation.gating == "silu":
                middle = torch.nn.functional.silu(g) * u
            else:
                middle = (u + 1) * g * torch.sigmoid(activation.alpha * g)
            out[token] += float(self.routing[token, slot]) * (down @ middle + biases[2])
        return out


def difference(out: np.ndarray, exact: torch.Tensor) -> float:
    """Relative L2."""
    return float(torch.linalg.norm(torch.from_numpy(out).double() - exact) / torch.linalg.norm(exact))


# Two products of up to 160 float32 steps and some twenty roundings, all of random sign: far below a sum of worst cases.
TOLERANCE = 200 * EPS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.gating}-{a.limit}")
def test_activation_is_its_formula(pool: _C.ThreadPool, activation: Activation, bias: bool) -> None:
    case = Case(1, bias=bias)
    exact = case.exact(activation)
    assert difference(case.forward(pool, activation), exact) < TOLERANCE
    for other in ACTIVATIONS:
        assert other == activation or difference(case.forward(pool, other), exact) > 100 * TOLERANCE


def test_limits_and_biases_keep_rows_independent(pool: _C.ThreadPool, crowd: _C.ThreadPool) -> None:
    case, activation = Case(2, bias=True), ACTIVATIONS[-1]
    out = case.forward(pool, activation)
    layer = case.layer(crowd, activation)
    for token in range(TOKENS):
        row = slice(token, token + 1)
        alone = np.empty_like(case.x[row])
        layer.forward(case.x[row], case.ids[row], case.routing[row], alone)
        np.testing.assert_array_equal(alone, out[row])


def test_gpt_oss_experts_of_transformers(pool: _C.ThreadPool) -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = pytest.importorskip("transformers").GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    case = Case(3, bias=True)
    experts = gpt_oss.GptOssExperts(config).double().eval()
    with torch.no_grad():
        for expert, (weights, biases) in enumerate(zip(case.weights, case.biases, strict=True)):
            gate, up, down = (torch.from_numpy(w).double() for w in weights)
            gate_bias, up_bias, down_bias = (torch.from_numpy(b).double() for b in biases)
            experts.gate_up_proj[expert, :, ::2], experts.gate_up_proj[expert, :, 1::2] = gate.T, up.T
            experts.gate_up_proj_bias[expert, ::2], experts.gate_up_proj_bias[expert, 1::2] = gate_bias, up_bias
            experts.down_proj[expert], experts.down_proj_bias[expert] = down.T, down_bias
        exact = experts(
            torch.from_numpy(case.x).double(),
            torch.from_numpy(case.ids).long(),
            torch.from_numpy(case.routing).double(),
        )
    activation = Activation("swigluoai", limit=experts.limit, alpha=experts.alpha)
    assert activation == ACTIVATIONS[2]
    assert difference(case.forward(pool, activation), exact) < TOLERANCE


@pytest.mark.parametrize(
    "change", [{"activation": "gelu"}, {"limit": 0.0}, {"limit": math.nan}, {"alpha": math.inf}], ids=str
)
def test_constructor_refuses(pool: _C.ThreadPool, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\[ExpertLayer\] expected .*, got "):
        _C.ExpertLayer(_C.ExpertWorkspace(pool), 2, 32, 32, "f32", **change)


def test_load_refuses_biases(pool: _C.ThreadPool) -> None:
    weight = np.ones((32, 32), np.float32)
    plain = RawLinear("f32", 32, 32, weight, None)
    without = _C.ExpertLayer(_C.ExpertWorkspace(pool), 2, 32, 32, "f32")
    with pytest.raises(ValueError, match="expected no bias, as the layer was made without"):
        without.load(0, plain, plain, RawLinear("f32", 32, 32, weight, None, bias=np.ones(32, np.float32)))
    with_bias = _C.ExpertLayer(_C.ExpertWorkspace(pool), 2, 32, 32, "f32", bias=True)
    with pytest.raises(ValueError, match=r"expected up.bias with shape \[32\]"):
        with_bias.load(0, plain, RawLinear("f32", 32, 32, weight, None, bias=np.ones(31, np.float32)), plain)
    assert not without.is_loaded(0) and not with_bias.is_loaded(0)
    with_bias.load(0, plain, plain, plain)
