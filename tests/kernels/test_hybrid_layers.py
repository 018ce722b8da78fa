"""Layers built from a plan: experts where it has them, decode and streamed prompts as on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.kernels.hybrid_cases import CPU, NativeCompute, forward, make_layer, rounding, routing
from tests.kernels.test_experts import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K

from proa.core.errors import MemoryShortageError
from proa.layers.mlp import SILU
from proa.layers.workspace import ExpertPlan, Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.hybrid_layers import Hybrid
from proa.moe.strategies import AllGpu
from proa.moe.strategy import LayerContext
from proa.native._C import CudaError

LAYERS = 3


@pytest.mark.parametrize("num_gpu", [0, 2, EXPERTS])
@pytest.mark.parametrize(("stream_from", "stream_all"), [(None, False), (6, True), (6, False)])
def test_results_are_those_of_the_cpu(driver, pool, monkeypatch, num_gpu, stream_from, stream_all):
    compute = NativeCompute(pool, "int4_g32")
    monkeypatch.setattr(Hybrid, "_grouped", lambda self, experts: compute)
    on_gpu = np.zeros((LAYERS, EXPERTS), np.bool_)
    on_gpu[:, :num_gpu] = True
    runtime = SimpleNamespace(pool=pool, cpus=[-1])
    workspace = Workspace(SimpleNamespace(torch_device=CPU, runtime=runtime), 64)
    plan = ExpertPlan(on_gpu, stream_from, 8 * sum(compute.sizes), stream_all)
    hybrid = Hybrid(workspace, plan, driver, TOP_K, HIDDEN)
    rng = np.random.default_rng(0)
    native = [make_layer(pool, seed) for seed in range(LAYERS)]
    cases = []
    for tokens in (1, 7, 40):
        xs = [torch.from_numpy(rng.standard_normal((tokens, HIDDEN), np.float32)) for _ in range(LAYERS)]
        topks = [routing(tokens, rng) for _ in range(LAYERS)]
        expected = [forward(layer, x, t.ids, t.weights) for layer, x, t in zip(native, xs, topks, strict=True)]
        bounds = [2 * rounding(layer, x, t) for layer, x, t in zip(native, xs, topks, strict=True)]
        cases.append((xs, topks, expected, bounds))
    layers = [hybrid.add(CpuExperts(layer, HIDDEN, INTERMEDIATE, SILU)) for layer in native]
    for layer in layers:
        assert layer.gpu.experts == list(range(num_gpu))
        assert layer.cpu.layer.nbytes == (EXPERTS - num_gpu) * layer.cpu.layer.bytes_per_expert
        assert (layer.prefill is not None) == (stream_from is not None)
        assert (layer.decode is None) == (num_gpu == EXPERTS)
    workspace.loaded()
    ways = ["decode"] + ["prefill"] * (stream_from is not None)
    for way in ways * 2:
        for xs, topks, expected, bounds in cases:
            for i, layer in enumerate(layers):
                ctx = LayerContext(i, torch.full_like(xs[i], float("nan")))
                # Where all are on the GPU nothing is handed over.
                strategy = AllGpu(layer.gpu) if num_gpu == EXPERTS and way == "decode" else getattr(layer, way)
                strategy.submit(xs[i], topks[i], ctx)
                strategy.finish(xs[i], topks[i], ctx)
                assert ((ctx.out - expected[i]).abs() <= bounds[i]).all()
    for i, slots in enumerate(hybrid.traffic().slots):
        routed = 2 * sum(int(topks[i].ids.numel()) for _, topks, _, _ in cases)
        on_gpu = 2 * sum(int((topks[i].ids < num_gpu).sum()) for _, topks, _, _ in cases)
        assert slots == ((1, 1) if num_gpu == EXPERTS else (routed, on_gpu)), i


class Refusing:
    """A driver that pins the experts of one layer and no more."""

    def __init__(self, driver):
        self._driver = driver
        self._left = 1

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def pin(self, ranges, threads):
        if self._left == 0:
            raise CudaError("[cuMemHostRegister] expected success, got CUDA_ERROR_OUT_OF_MEMORY (2)")
        self._left -= 1
        self._driver.pin(ranges, threads)


def hybrid_that_pins_little(driver, pool, monkeypatch, **fields):
    compute = NativeCompute(pool, "int4_g32")
    monkeypatch.setattr(Hybrid, "_grouped", lambda self, experts: compute)
    workspace = Workspace(SimpleNamespace(torch_device=CPU, runtime=SimpleNamespace(pool=pool, cpus=[-1])), 64)
    on_gpu = np.zeros((LAYERS, EXPERTS), np.bool_)
    on_gpu[:, 0] = True
    plan = ExpertPlan(on_gpu, ring_bytes=8 * sum(compute.sizes), **fields)
    hybrid = Hybrid(workspace, plan, driver, TOP_K, HIDDEN)
    hybrid._driver = Refusing(driver)
    return hybrid, workspace


def test_layers_that_cannot_be_pinned_stay_on_the_cpu(driver, pool, monkeypatch, caplog):
    hybrid, workspace = hybrid_that_pins_little(driver, pool, monkeypatch, stream_from=6)
    native = [make_layer(pool, seed) for seed in range(LAYERS)]
    rng = np.random.default_rng(0)
    xs = [torch.from_numpy(rng.standard_normal((40, HIDDEN), np.float32)) for _ in native]
    topks = [routing(40, rng) for _ in native]
    expected = [forward(layer, x, t.ids, t.weights) for layer, x, t in zip(native, xs, topks, strict=True)]
    bounds = [2 * rounding(layer, x, t) for layer, x, t in zip(native, xs, topks, strict=True)]
    with caplog.at_level("WARNING", logger="proa.moe"):
        layers = [hybrid.add(CpuExperts(layer, HIDDEN, INTERMEDIATE, SILU)) for layer in native]
    assert [record.args[0] for record in caplog.records] == [1, 2]
    workspace.loaded()
    assert all(not plan.streamed for plan in hybrid._plans(40)[1:])
    for i, layer in enumerate(layers):
        ctx = LayerContext(i, torch.full_like(xs[i], float("nan")))
        layer.prefill.submit(xs[i], topks[i], ctx)
        layer.prefill.finish(xs[i], topks[i], ctx)
        assert ((ctx.out - expected[i]).abs() <= bounds[i]).all()


@pytest.mark.parametrize("fields", [{"stream_from": 6, "stream_all": True}, {"moves": 1, "ram_slots": 1}])
def test_experts_that_have_to_be_pinned_and_cannot_be_are_refused_with_numbers(driver, pool, monkeypatch, fields):
    hybrid, _ = hybrid_that_pins_little(driver, pool, monkeypatch, **fields)
    layers = [CpuExperts(make_layer(pool, seed), HIDDEN, INTERMEDIATE, SILU) for seed in range(2)]
    hybrid.add(layers[0])
    with pytest.raises(MemoryShortageError, match=r"GiB for a layer's experts, got .* \(2\) with .* GiB pinned"):
        hybrid.add(layers[1])


def test_experts_leave_ram_while_their_layer_is_loaded(driver, pool, monkeypatch):
    """RAM holds those that stay and a few on their way, whatever the order; what is computed is the same."""
    monkeypatch.setattr("proa.moe.hybrid_layers.COPIED_TOGETHER", 2)
    compute = NativeCompute(pool, "int4_g32")
    monkeypatch.setattr(Hybrid, "_grouped", lambda self, experts: compute)
    on_gpu = np.zeros((1, EXPERTS), np.bool_)
    on_gpu[0, :-1] = True
    runtime = SimpleNamespace(pool=pool, cpus=[-1])
    workspace = Workspace(SimpleNamespace(torch_device=CPU, runtime=runtime), 64)
    hybrid = Hybrid(workspace, ExpertPlan(on_gpu), driver, TOP_K, HIDDEN)
    whole = make_layer(pool, 0)
    x, topk = torch.randn(7, HIDDEN), routing(7, np.random.default_rng(0))
    expected, bound = forward(whole, x, topk.ids, topk.weights), 2 * rounding(whole, x, topk)
    most = 0

    def told(layer, expert):
        nonlocal most
        most = max(most, layer.nbytes // layer.bytes_per_expert)
        hybrid.arrive(CpuExperts(layer, HIDDEN, INTERMEDIATE, SILU), expert)

    native = make_layer(pool, 0, told=told)
    layer = hybrid.add(CpuExperts(native, HIDDEN, INTERMEDIATE, SILU))
    assert most == 2 and native.nbytes == native.bytes_per_expert
    assert layer.gpu.experts == list(range(EXPERTS - 1))
    ctx = LayerContext(0, torch.empty_like(x))
    layer.decode.submit(x, topk, ctx)
    layer.decode.finish(x, topk, ctx)
    assert ((ctx.out - expected).abs() <= bound).all()
