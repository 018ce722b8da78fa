"""ExpertLayer against float64 with a derived error bound, its bits under other batches, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.weight_cases import EPS, FORMATS, PRODUCT_ERROR, WeightCase, product

from proa.native import _C
from proa.weights.linear import RawLinear

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 96, 160, 6, 3, 160


@dataclass(frozen=True, slots=True)
class Experts:
    """Random experts (gate, up, down) of one layer."""

    format: str
    down_format: str
    linears: list[tuple[WeightCase, WeightCase, WeightCase]]

    @classmethod
    def make(cls, fmt: str, seed: int = 0, *, down: str | None = None) -> Experts:
        rng = np.random.default_rng(seed)
        kinds = [(fmt, INTERMEDIATE, HIDDEN), (fmt, INTERMEDIATE, HIDDEN), (down or fmt, HIDDEN, INTERMEDIATE)]
        linears = [tuple(WeightCase.make(*kind, rng) for kind in kinds) for _ in range(EXPERTS)]
        return cls(fmt, down or fmt, linears)

    def load(
        self,
        where: _C.ThreadPool | _C.ExpertWorkspace,
        told: Callable[[_C.ExpertLayer, int], None] = lambda *_: None,
    ) -> _C.ExpertLayer:
        """In `where`, or in a workspace of its own on that pool. `told`: of each expert that is there."""
        workspace = where if isinstance(where, _C.ExpertWorkspace) else _C.ExpertWorkspace(where, MAX_TOKENS)
        down = None if self.down_format == self.format else self.down_format
        layer = _C.ExpertLayer(workspace, EXPERTS, HIDDEN, INTERMEDIATE, self.format, max_top_k=TOP_K, down_format=down)
        for expert, (gate, up, down) in enumerate(self.linears):
            layer.load(expert, gate, up, down)
            told(layer, expert)
        return layer

    def exact(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(float64 result with activations as the kernels see them, bound on the error of the float32 computation)."""
        x, weights = x.astype(np.float64), weights.astype(np.float64)
        result, bound = np.zeros_like(x), np.zeros_like(x)
        for token, slot in np.argwhere(ids >= 0):
            gate, up, down = (case.values for case in self.linears[ids[token, slot]])
            row = x[token : token + 1]
            (g, g_error), (u, u_error) = (product(self.format, w, row, activations="int8") for w in (gate, up))
            silu = g / (1 + np.exp(-g))
            middle = silu * u
            # |silu'| < 1.1; exp to 2 ulp, an addition, a division and a product: fewer than 8 roundings.
            error = 1.1 * g_error * (np.abs(u) + u_error) + np.abs(silu) * u_error
            error += 8 * EPS * (np.abs(middle) + error)
            value, value_error = (
                array[0] for array in product(self.down_format, down, middle, error, "int8", PRODUCT_ERROR)
            )
            result[token] += weights[token, slot] * value
            bound[token] += abs(weights[token, slot]) * (value_error + 2 * TOP_K * EPS * (np.abs(value) + value_error))
        return result, bound


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def make(cls, tokens: int, seed: int, lowest_id: int = -1) -> Batch:
        rng = np.random.default_rng(seed)
        return cls(
            rng.standard_normal((tokens, HIDDEN), np.float32),
            rng.integers(lowest_id, EXPERTS, (tokens, TOP_K)).astype(np.int32),
            rng.standard_normal((tokens, TOP_K), np.float32),
        )

    def __getitem__(self, rows: Any) -> Batch:
        return Batch(*(np.ascontiguousarray(array[rows]) for array in (self.x, self.ids, self.weights)))


def forward(layer: _C.ExpertLayer, batch: Batch, accumulate_onto: float | None = None) -> np.ndarray:
    out = np.full_like(batch.x, np.nan if accumulate_onto is None else accumulate_onto)
    layer.forward(batch.x, batch.ids, batch.weights, out, accumulate=accumulate_onto is not None)
    return out


# One format for all projections, or another one for down, which then reads other activations than gate and up.
@pytest.fixture(scope="module", params=[*((f, f) for f in FORMATS), ("int4_g32", "f32"), ("f16", "int4_g32")], ids=str)
def experts(request: pytest.FixtureRequest) -> Experts:
    fmt, down = request.param
    return Experts.make(fmt, down=down)


def test_result_is_within_its_error_bound(pool: _C.ThreadPool, experts: Experts) -> None:
    layer = experts.load(pool)

    @settings(max_examples=15, deadline=None)
    @given(st.integers(1, 40), st.integers(0, 2**32))
    def check(tokens: int, seed: int) -> None:
        batch = Batch.make(tokens, seed)
        out = forward(layer, batch)
        exact, bound = experts.exact(batch.x, batch.ids, batch.weights)
        assert (np.abs(out - exact) <= bound).all()
        # The bound is one: half the size of a row would let anything pass. Three tokens in a thousand have a group
        # whose number of planes is too close a call for float64 to tell, and a bound that allows for either.
        rows = (batch.ids >= 0).any(axis=1)
        usual = (
            np.median(np.linalg.norm(bound[rows], axis=1) / np.linalg.norm(exact[rows], axis=1)) if rows.any() else 0
        )
        assert usual < 0.5 or rows.sum() < 3

    check()


def test_rows_do_not_depend_on_batch_order_or_threads(
    pool: _C.ThreadPool, single: _C.ThreadPool, crowd: _C.ThreadPool, experts: Experts
) -> None:
    layer = experts.load(pool)
    batch = Batch.make(MAX_TOKENS, 1)
    out = forward(layer, batch)
    order = np.random.default_rng(2).permutation(MAX_TOKENS)
    np.testing.assert_array_equal(forward(layer, batch[order]), out[order])
    np.testing.assert_array_equal(np.concatenate([forward(layer, batch[i : i + 1]) for i in range(MAX_TOKENS)]), out)
    np.testing.assert_array_equal(
        np.concatenate([forward(layer, batch[i : i + 7]) for i in range(0, MAX_TOKENS, 7)]), out
    )
    np.testing.assert_array_equal(forward(experts.load(single), batch), out)
    np.testing.assert_array_equal(forward(experts.load(crowd), batch), out)


@pytest.mark.parametrize(
    "nodes", [[0, 1], [0, 0, 1], [2, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5, 5], [0] * 15, [0] * 15 + [1] * 8], ids=str
)
def test_numa_nodes_change_no_bits(pool: _C.ThreadPool, experts: Experts, nodes: list[int]) -> None:
    batch = Batch.make(MAX_TOKENS, 1)
    sharded = _C.ThreadPool([_C.cpu_info()["cpus"][0]["cpu"]] * len(nodes), nodes)
    layer, whole = experts.load(sharded), experts.load(pool)
    assert sharded.num_nodes == len(set(nodes)) and layer.nbytes == whole.nbytes
    out = forward(whole, batch)
    np.testing.assert_array_equal(forward(layer, batch), out)
    np.testing.assert_array_equal(forward(layer, batch[:1]), out[:1])
    sharded.close()


def test_one_expert_for_all_tokens(pool: _C.ThreadPool, experts: Experts) -> None:
    layer = experts.load(pool)
    batch = Batch.make(MAX_TOKENS, 3)
    same = Batch(batch.x, np.full_like(batch.ids, 4), batch.weights)
    exact, bound = experts.exact(same.x, same.ids, same.weights)
    assert (np.abs(forward(layer, same) - exact) <= bound).all()


def test_skipped_slots_and_accumulation(pool: _C.ThreadPool, experts: Experts) -> None:
    layer = experts.load(pool)
    batch = Batch.make(9, 4)
    batch.ids[3] = -1
    batch.weights[batch.ids < 0] = np.nan  # never read into the sum
    out = forward(layer, batch)
    assert np.isfinite(out).all() and (out[3] == 0).all()
    np.testing.assert_array_equal(forward(layer, batch, accumulate_onto=2.0), np.float32(2) + out)
    empty = Batch(batch.x, np.full_like(batch.ids, -1), batch.weights)
    assert (forward(layer, empty) == 0).all()
    assert forward(layer, batch[:0]).shape == (0, HIDDEN)


def test_a_dense_mlp_is_one_expert(pool: _C.ThreadPool, experts: Experts) -> None:
    gate, up, down = experts.linears[0]
    down_format = experts.down_format
    workspace = _C.ExpertWorkspace(pool, 8)
    layer = _C.ExpertLayer(workspace, 1, HIDDEN, INTERMEDIATE, experts.format, max_top_k=1, down_format=down_format)
    layer.load(0, gate, up, down)
    batch = Batch(Batch.make(8, 5).x, np.zeros((8, 1), np.int32), np.ones((8, 1), np.float32))
    exact, bound = experts.exact(batch.x, batch.ids, batch.weights)
    assert (np.abs(forward(layer, batch) - exact) <= bound).all()


def test_attributes(pool: _C.ThreadPool, experts: Experts) -> None:
    layer = experts.load(pool)
    bits = {"f32": 32, "bf16": 16, "f16": 16, "int4_g32": 4.5, "fp8_block128": 8, "fp8_channel": 8, "mxfp8": 8.25}
    weights = EXPERTS * HIDDEN * INTERMEDIATE * (2 * bits[experts.format] + bits[experts.down_format]) / 8
    assert layer.num_experts == EXPERTS and layer.kernel.endswith(experts.format)
    panels = EXPERTS * (2 * -(-INTERMEDIATE // 16) + -(-HIDDEN // 16))
    assert weights <= layer.nbytes <= weights * 1.02 + 64 * panels + 4096


def test_layers_share_a_workspace(pool: _C.ThreadPool) -> None:
    workspace = _C.ExpertWorkspace(pool, MAX_TOKENS)
    assert workspace.max_tokens == MAX_TOKENS and workspace.nbytes == 0
    layers = [_C.ExpertLayer(workspace, EXPERTS, HIDDEN, INTERMEDIATE, "f32", max_top_k=TOP_K) for _ in range(3)]
    pairs = MAX_TOKENS * TOP_K
    results = 4 * pairs * (HIDDEN + 32 * pool.num_threads)
    index = 8 * pairs + 64 * EXPERTS + 4
    assert 4 * pairs * INTERMEDIATE < workspace.nbytes <= 4 * pairs * INTERMEDIATE + results + index + 192
    before, alone = workspace.nbytes, _C.ExpertWorkspace(pool, MAX_TOKENS)
    wider = [_C.ExpertLayer(w, 1, HIDDEN, 8 * INTERMEDIATE, "f32", max_top_k=1) for w in (workspace, alone)]
    assert max(before, alone.nbytes) <= workspace.nbytes < before + alone.nbytes
    del layers, wider


def test_results_survive_the_growth_of_a_shared_workspace(pool: _C.ThreadPool, experts: Experts) -> None:
    workspace = _C.ExpertWorkspace(pool, MAX_TOKENS)
    first, batch = experts.load(workspace), Batch.make(MAX_TOKENS, 1)
    out = forward(first, batch)
    second = Experts.make(experts.format, seed=7).load(workspace)
    _C.ExpertLayer(workspace, 64, HIDDEN, 4 * INTERMEDIATE, experts.format, max_top_k=2 * TOP_K)
    assert not np.array_equal(forward(second, batch), out)
    np.testing.assert_array_equal(forward(first, batch), out)
    del workspace
    np.testing.assert_array_equal(forward(first, batch), out)


def test_counters_are_those_of_the_distinct_experts(pool: _C.ThreadPool, experts: Experts) -> None:
    layer = experts.load(pool)
    assert layer.bytes_per_expert * EXPERTS == layer.nbytes
    assert (layer.bytes_read, layer.seconds) == (0, 0.0)
    distinct = 0
    for ids in ([[0, 3, 5]], [[2, 2, 2], [2, -1, 2]], [[0, 1, 2], [2, 1, 0], [3, -1, 3]], [[-1, -1, -1]]):
        batch = Batch.make(len(ids), 0)
        batch.ids[:] = ids
        before, started = layer.seconds, time.perf_counter()
        forward(layer, batch)
        assert 0 < layer.seconds - before <= time.perf_counter() - started + 1e-6
        distinct += len(set(np.ravel(ids)) - {-1})
        assert layer.bytes_read == distinct * layer.bytes_per_expert
    assert distinct == 3 + 1 + 4
    total = layer.bytes_read, layer.seconds
    forward(layer, batch[:0])
    assert (layer.bytes_read, layer.seconds) == total


FORWARD_REFUSALS = [
    ({"x": np.ones((2, HIDDEN), np.float64)}, TypeError),
    ({"x": np.ones((2, HIDDEN + 1), np.float32)}, ValueError),
    ({"x": np.ones((2, 2 * HIDDEN), np.float32)[:, ::2]}, ValueError),
    ({"ids": np.zeros((2, 2), np.int64)}, TypeError),
    ({"ids": np.zeros((3, 2), np.int32)}, ValueError),
    ({"ids": np.full((2, 2), EXPERTS, np.int32)}, ValueError),
    ({"ids": np.full((2, 2), -2, np.int32)}, ValueError),
    ({"ids": np.full((2, 2), 1, np.int32)}, ValueError),  # not loaded
    ({"ids": np.zeros((2, 4), np.int32), "weights": np.ones((2, 4), np.float32)}, ValueError),
    ({"weights": np.ones((2, 3), np.float32)}, ValueError),
    ({"out": np.ones((1, HIDDEN), np.float32)}, ValueError),
    ({"out": np.broadcast_to(np.ones(HIDDEN, np.float32), (2, HIDDEN))}, ValueError),
]


@pytest.mark.parametrize("change,error", FORWARD_REFUSALS)
def test_forward_refuses(pool: _C.ThreadPool, change: dict[str, Any], error: type[Exception]) -> None:
    gate, up, down = Experts.make("f32").linears[0]
    layer = _C.ExpertLayer(_C.ExpertWorkspace(pool, 4), EXPERTS, HIDDEN, INTERMEDIATE, "f32", max_top_k=3)
    layer.load(0, gate, up, down)
    assert layer.is_loaded(0) and not layer.is_loaded(1)
    good = {
        "x": np.ones((2, HIDDEN), np.float32),
        "ids": np.zeros((2, 2), np.int32),
        "weights": np.ones((2, 2), np.float32),
        "out": np.ones((2, HIDDEN), np.float32),
    }
    layer.forward(**good)
    with pytest.raises(error, match=r"\[ExpertLayer.forward\] expected .*, got "):
        layer.forward(**(good | change))


def test_forward_refuses_more_tokens_than_planned(pool: _C.ThreadPool, experts: Experts) -> None:
    with pytest.raises(ValueError, match=r"at most max_tokens = 160 tokens, got 161"):
        forward(experts.load(pool), Batch.make(MAX_TOKENS + 1, 0))


@pytest.mark.parametrize(
    "change",
    [{"num_experts": 0}, {"hidden": -1}, {"intermediate": 0}, {"format": "int4"}, {"activation": "gelu"}]
    + [{"max_top_k": 0}, {"max_top_k": (1 << 10) + 1}, {"format": "int4_g32", "intermediate": 48}],
)
def test_constructor_refuses(pool: _C.ThreadPool, change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"num_experts": 2, "hidden": 32, "intermediate": 32, "format": "f32"}
    workspace = _C.ExpertWorkspace(pool, 1 << 20)
    _C.ExpertLayer(_C.ExpertWorkspace(pool), **good)
    with pytest.raises(ValueError, match=r"\[ExpertLayer\] expected .*, got "):
        _C.ExpertLayer(workspace, **(good | change))
    assert workspace.nbytes == 0


def test_workspace_refuses(pool: _C.ThreadPool) -> None:
    for max_tokens in (0, -1, (1 << 20) + 1):
        with pytest.raises(ValueError, match=r"\[ExpertWorkspace\] expected max_tokens in 1 .. 1048576, got "):
            _C.ExpertWorkspace(pool, max_tokens)
    closed = _C.ThreadPool([_C.cpu_info()["cpus"][0]["cpu"]])
    closed.close()
    with pytest.raises(ValueError, match=r"\[ThreadPool\] expected an open pool"):
        _C.ExpertWorkspace(closed)
    with pytest.raises(TypeError):
        _C.ExpertLayer(None, 2, 32, 32, "f32")


def test_load_refuses(pool: _C.ThreadPool) -> None:
    layer = _C.ExpertLayer(_C.ExpertWorkspace(pool), 2, 32, 64, "f32")
    gate = RawLinear("f32", 64, 32, np.ones((64, 32), np.float32), None)
    down = RawLinear("f32", 32, 64, np.ones((32, 64), np.float32), None)
    with pytest.raises(ValueError, match="expected expert in 0 .. 1, got 2"):
        layer.load(2, gate, gate, down)
    with pytest.raises(ValueError, match=r"expected down as 'f32' \[32, 64\], got 'f32' \[64, 32\]"):
        layer.load(0, gate, gate, gate)
    with pytest.raises(ValueError, match=r"expected up as 'f32' \[64, 32\], got 'bf16' \[64, 32\]"):
        layer.load(0, gate, replace(gate, format="bf16"), down)
    with pytest.raises(ValueError, match=r"expected gate.data with shape \[64, 32\], got \[32, 64\]"):
        layer.load(0, replace(gate, data=down.data), gate, down)
    with pytest.raises(TypeError, match=r"expected gate with the attributes of RawLinear, got .*ndarray without"):
        layer.load(0, gate.data, gate, down)
    with pytest.raises(ValueError, match=r"\[ExpertLayer.is_loaded\]"):
        layer.is_loaded(-1)
    assert not layer.is_loaded(0)


def test_a_workspace_can_be_resident_from_the_start(pool: _C.ThreadPool) -> None:
    """Where memory belongs to nodes its pages wait for those who compute with them."""

    def resident() -> int:
        return psutil.Process().memory_info().rss

    workspace = _C.ExpertWorkspace(pool, 1 << 15)
    layer = Experts.make("int4_g32").load(workspace)
    before = resident()
    workspace.touch()
    grown, nodes = resident() - before, len({node for _, node in _C.worker_cpus(pool.num_threads)})
    assert nodes > 1 or grown >= 0.8 * workspace.nbytes > 0
    assert layer.is_loaded(0)
