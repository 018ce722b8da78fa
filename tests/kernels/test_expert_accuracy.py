"""A whole expert layer (gate, up, silu, down) against float64 of the dequantized weights, for every weight format.

The goal is 4e-3 with float activations and 1.2e-2 with int8 ones, in relative L2 norm (csrc/gemm/act_budget.h says how
int8 keeps to it).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import pytest

from proa.layers.known_data import block_weight
from proa.native import _C
from proa.weights.formats import ROW_FORMATS
from proa.weights.linear import RawLinear
from proa.weights.quantize import quantize

HIDDEN, INTERMEDIATE, TOKENS = 512, 768, 8
FORMATS = [name for name in _C.weight_formats() if any(row["chosen"] for row in _C.kernel_report(name, 256, 256))]
LIMITS = {"bf16": 4e-3, "int8": 1.2e-2}
COSINE = 0.9999


@cache
def expert(fmt: str) -> tuple[RawLinear, RawLinear, RawLinear]:
    """gate, up, down."""
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    if fmt not in ROW_FORMATS:
        gate, up, down = (block_weight(fmt, *shape, seed) for seed, shape in enumerate(shapes))
        return gate, up, down
    rng = np.random.default_rng(1)
    gate, up, down = (quantize(rng.standard_normal(s, np.float32) / np.float32(s[1] ** 0.5), fmt) for s in shapes)
    return gate, up, down


def inputs(kind: str) -> np.ndarray:
    """float32 [TOKENS, HIDDEN]; outliers: six channels are 50 to 100 times as large, as in trained models."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    if kind == "outliers":
        channels = rng.choice(HIDDEN, 6, replace=False)
        x[:, channels] *= rng.uniform(50, 100, 6).astype(np.float32)
    return x


def chosen(fmt: str, activations: Literal["int8", "bf16"]) -> str:
    return next(row["name"] for row in _C.kernel_report(fmt, 256, 256, activations) if row["chosen"])


def layer_of(pool: _C.ThreadPool, fmt: str, activations: Literal["int8", "bf16"]) -> _C.ExpertLayer:
    workspace = _C.ExpertWorkspace(pool, TOKENS)
    layer = _C.ExpertLayer(workspace, 1, HIDDEN, INTERMEDIATE, fmt, max_top_k=1, activations=activations)
    layer.load(0, *expert(fmt))
    return layer


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_layer_is_as_accurate_as_promised(
    pool: _C.ThreadPool, fmt: str, activations: Literal["int8", "bf16"], kind: str
) -> None:
    x = inputs(kind)
    found = np.empty_like(x)
    ids, weights = np.zeros((TOKENS, 1), np.int32), np.ones((TOKENS, 1), np.float32)
    layer_of(pool, fmt, activations).forward(x, ids, weights, found)
    gate, up, down = (_C.PackedWeight.pack(pool, raw).dequantize().astype(np.float64) for raw in expert(fmt))
    gated = x @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    cosine = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    total = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert total <= LIMITS[activations]
    assert cosine.min() >= COSINE


@pytest.mark.parametrize("fmt", FORMATS)
def test_bf16_activations_use_no_int8_cell(fmt: str) -> None:
    has_float = any(".f32_act." in row["name"] for row in _C.kernel_report(fmt, 256, 256))
    assert (".f32_act." in chosen(fmt, "bf16")) == has_float and ".f32_act." not in chosen(fmt, "int8")
