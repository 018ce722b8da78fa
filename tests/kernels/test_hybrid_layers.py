"""Layers built from a plan: experts where it has them, decode and streamed prompts as on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.kernels.fake_cuda import build_fake_driver
from tests.kernels.hybrid_cases import CPU, NativeCompute, forward, make_layer, rounding, routing
from tests.kernels.test_experts import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K

from proa.layers.mlp import SILU
from proa.layers.workspace import ExpertPlan, Workspace
from proa.moe.cpu_experts import CpuExperts
from proa.moe.hybrid_layers import Hybrid
from proa.moe.strategies import AllGpu
from proa.moe.strategy import LayerContext

LAYERS = 3


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


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
