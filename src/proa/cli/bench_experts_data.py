"""The random weights and inputs of `proa bench experts`, the same for every side of a comparison."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from proa.cli.bench_experts_spec import ExpertDims, ExpertSpec, Method
from proa.layers.known_data import block_weight
from proa.weights.linear import RawLinear
from proa.weights.quantize import quantize

__all__ = ["Inputs", "RawExpert", "make_inputs", "random_experts"]

# Expert e holds the values of variant e % VARIANTS, in memory of its own on every side.
VARIANTS = 4
# Rows are made up to here and repeated from there on: speed depends on where weights lie, not on what they are.
RANDOM_ROWS = 512
ROUTINGS = 16


@dataclass(frozen=True, slots=True)
class RawExpert:
    """One expert as a checkpoint stores it: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: RawLinear
    up: RawLinear
    down: RawLinear


def random_experts(spec: ExpertSpec) -> list[RawExpert]:
    """VARIANTS experts of normal numbers with outputs of order 1: one, its rows rolled on from each to the next."""
    rng = np.random.default_rng(0)
    hidden, intermediate = spec.dims.hidden, spec.dims.intermediate
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    gate, up, down = (_random_linear(rng, spec.method, *shape) for shape in shapes)
    return [RawExpert(*(_rolled(linear, variant) for linear in (gate, up, down))) for variant in range(VARIANTS)]


def _random_linear(rng: np.random.Generator, method: Method, rows: int, columns: int) -> RawLinear:
    made = min(rows, RANDOM_ROWS)
    if method.layout == "ggml":
        part = block_weight(method.format, made, columns, seed=0)
    else:
        part = quantize(rng.standard_normal((made, columns), np.float32) * np.float32(columns**-0.5), method.format)
    if made == rows:
        return part
    repeats = -(-rows // made)
    data = np.concatenate([part.data] * repeats)[:rows]
    # Scales are per row, or per block of 128 rows, which divides RANDOM_ROWS.
    scales = part.scales
    if scales is not None:
        scales = np.concatenate([scales] * repeats)[: -(-rows * len(scales) // made)]
    return dataclasses.replace(part, out_features=rows, data=data, scales=scales)


def _rolled(linear: RawLinear, variant: int) -> RawLinear:
    """Any rows with any scales are a valid weight, so both just roll."""
    scales = linear.scales
    return dataclasses.replace(
        linear,
        data=np.roll(linear.data, 16 * variant, axis=0),
        scales=None if scales is None else np.roll(scales, variant, axis=0),
    )


@dataclass(frozen=True, slots=True)
class Inputs:
    """x float32 [T, hidden]; ids int32 and weights float32 [ROUTINGS, T, top_k]: distinct experts per token."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.x)

    def distinct_experts(self) -> float:
        """Mean over the routings of how many experts a call touches."""
        return float(np.mean([len(np.unique(ids)) for ids in self.ids]))


def make_inputs(dims: ExpertDims, tokens: int) -> Inputs:
    """Normal activations, uniformly random experts, weights that sum to 1 per token."""
    rng = np.random.default_rng(tokens)
    ids = np.empty((ROUTINGS, tokens, dims.top_k), np.int32)
    for routing in ids:
        routing[:] = np.argsort(rng.random((tokens, dims.experts)), axis=1)[:, : dims.top_k]
    weights = rng.random(ids.shape, np.float32) + np.float32(0.1)
    weights /= weights.sum(axis=2, keepdims=True)
    return Inputs(rng.standard_normal((tokens, dims.hidden), np.float32), ids, weights)
