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
    workspace.loaded()
    ways = ["decode"] + ["prefill"] * (stream_from is not None)
    for way in ways * 2:
        for xs, topks, expected, bounds in cases:
            for i, layer in enumerate(layers):
                ctx = LayerContext(i, torch.full_like(xs[i], float("nan")))
                getattr(layer, way).submit(xs[i], topks[i], ctx)
                getattr(layer, way).finish(xs[i], topks[i], ctx)
                assert ((ctx.out - expected[i]).abs() <= bounds[i]).all()
