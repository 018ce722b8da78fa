"""Experts leave a layer's memory and come back as bytes: same bits, no memory for those that are away."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from tests.kernels.test_experts import EXPERTS, HIDDEN, TOP_K, Experts

from proa.native import _C

PAGE = 4096


@pytest.fixture(scope="module", params=[1, 3], ids=["one node", "three nodes"])
def pool(request):
    cpu = _C.cpu_info()["cpus"][0]["cpu"]
    pool = _C.ThreadPool([cpu] * 3, list(range(request.param)) * (3 // request.param))
    yield pool
    pool.close()


def view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def read(layer, expert):
    return np.concatenate([view(*block) for block in layer.blocks(expert)])


def run(layer, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(9)]).astype(np.int32)
    x, out = rng.standard_normal((9, HIDDEN), np.float32), np.empty((9, HIDDEN), np.float32)
    layer.forward(x, ids, np.full((9, TOP_K), 0.5, np.float32), out)
    return out


@pytest.mark.parametrize(("fmt", "down"), [("int4_g32", None), ("fp8_block128", "bf16")])
def test_the_blocks_are_gate_up_and_down_as_packed(pool, fmt, down):
    experts = Experts.make(fmt, down=down)
    layer = experts.load(pool)
    packed = np.concatenate([read(layer, 3)])
    assert packed.nbytes == layer.bytes_per_expert
    sizes = [_C.packed_bytes(linear.format, linear.out_features, linear.in_features) for linear in experts.linears[3]]
    assert packed.nbytes == sum(sizes)
    again = experts.load(_C.ExpertWorkspace(pool, 16))
    assert np.array_equal(packed, read(again, 3))


def test_an_expert_that_returns_computes_the_same(pool):
    layer = Experts.make("int4_g32").load(pool)
    expected, nbytes = run(layer), layer.nbytes
    away = {expert: read(layer, expert) for expert in (0, 2, 5)}
    for expert in away:
        layer.drop(expert)
        assert not layer.is_loaded(expert)
    assert layer.nbytes == nbytes - 3 * layer.bytes_per_expert
    with pytest.raises(ValueError, match="loaded"):
        run(layer)
    layer.release_memory()
    for expert in (5, 0, 2):  # into slots of others
        layer.reserve(expert)
        assert not layer.is_loaded(expert)
        start = 0
        for address, size in layer.blocks(expert):
            view(address, size)[:] = away[expert][start : start + size]
            start += size
        layer.commit(expert)
    assert layer.nbytes == nbytes
    assert np.array_equal(run(layer), expected)


def test_released_memory_is_gone(pool):
    layer = Experts.make("int4_g32").load(pool)
    places = layer.blocks(1)
    before = read(layer, 1)
    layer.drop(1)
    layer.reserve(1)
    assert layer.blocks(1) == places
    assert np.array_equal(read(layer, 1), before)  # kept for who comes next
    layer.drop(1)
    layer.release_memory()
    layer.reserve(1)
    assert layer.blocks(1) == places
    assert not read(layer, 1).any()


def test_memory_that_was_kept_is_used_first(pool):
    layer = Experts.make("int4_g32").load(pool)
    assert layer.spare_slots == 0
    kept = layer.blocks(4)
    layer.drop(0)
    layer.drop(1)
    layer.release_memory()
    assert layer.spare_slots == 0
    layer.drop(4)
    assert layer.spare_slots == 1
    layer.reserve(0)  # not into the slot it had, whose memory is gone
    assert layer.blocks(0) == kept and layer.spare_slots == 0
    layer.reserve(1)
    assert layer.blocks(1) != kept and layer.spare_slots == 0


def test_used_memory_covers_the_experts_in_whole_pages(pool):
    layer = Experts.make("int4_g32").load(pool)
    one_run = layer.used_memory
    assert len(one_run) == pool.num_nodes
    layer.drop(2)
    ranges = layer.used_memory
    assert sum(size for _, size in ranges) < sum(size for _, size in one_run)
    assert all(start % PAGE == 0 and size % PAGE == 0 for start, size in ranges)
    for expert in (0, 1, 3, 4, 5):
        for address, size in layer.blocks(expert):
            assert any(start <= address and address + size <= start + length for start, length in ranges)


def test_misuse_is_refused(pool):
    layer = Experts.make("int4_g32").load(pool)
    for call in (layer.blocks, layer.reserve, layer.commit, layer.drop):
        with pytest.raises(ValueError, match="expert"):
            call(EXPERTS)
    layer.drop(4)
    layer.drop(4)
    for call in (layer.blocks, layer.commit):
        with pytest.raises(ValueError, match="reserved"):
            call(4)
