"""The self-test of a GPU trunk, in plain torch on the CPU: right kernels pass it, each wrong one is named."""

from __future__ import annotations

import types

import pytest
import torch

from proa.attention.gpu import GpuAttention, torch_attention
from proa.attention.shape import HeadShape
from proa.core.errors import KernelFaultError
from proa.device.gpu import GpuDevice
from proa.kernels import reference
from proa.kvcache.layout import KVLayout
from proa.layers.gpu_check import check_gpu_trunk
from proa.layers.kernel_check import KernelUse

LAYOUTS = {"mla": KVLayout(2, 1, 96, 64, latent=True), "gqa": KVLayout(2, 2, 32, 32)}
USES = [KernelUse("bf16", 48, 512), KernelUse("int4_g32", 48, 512), KernelUse("mxfp4", 32, 64, "int8")]


def device_of(runtime, **kernels):
    module = types.SimpleNamespace(**{**vars(reference), **kernels})
    return GpuDevice(runtime, torch.device("cpu"), module)


def check(device, layout, uses=USES, attention=None):
    attention = attention or torch_attention(device, HeadShape(4, layout.value_dim))
    check_gpu_trunk(device, attention, uses, layout, 4)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("uses", [USES, [KernelUse("f32", 48, 512)]], ids=["few_bits", "float32"])
def test_right_kernels_pass(runtime, name, uses):
    check(device_of(runtime), LAYOUTS[name], uses)


def almost_norm(x, weight, eps, out):
    reference.rms_norm(x, weight, eps, out)
    out[-1, -1] += 2.0**-10


def half_rotated(x, cos, sin, positions, **options):
    reference.rope(x[:3], cos, sin, positions[:3], **options)


def swapped(logits, ids, weights, **options):
    reference.route(logits, ids, weights, **options)
    ids[:, :2] = ids[:, [1, 0]]


@pytest.mark.parametrize(
    ("name", "kernel", "named"),
    [("rms_norm", almost_norm, "norm"), ("rope", half_rotated, "rotation"), ("route", swapped, "router")],
)
def test_a_wrong_row_operation_is_named(runtime, name, kernel, named):
    with pytest.raises(KernelFaultError, match=f"GPU kernel: {named}"):
        check(device_of(runtime, **{name: kernel}), LAYOUTS["gqa"])


def test_a_wrong_linear_is_named(runtime):
    device = device_of(runtime)
    pack = device.pack

    def transposed_groups(raw):
        weight = pack(raw)
        if raw.format == "int4_g32":
            weight._weight.scales.copy_(weight._weight.scales.flip(1).clone())
        return weight

    device.pack = transposed_groups
    with pytest.raises(KernelFaultError, match="linears of int4_g32"):
        check(device, LAYOUTS["gqa"])


@pytest.mark.parametrize("rows", [slice(1, 2), slice(2, None)], ids=["single", "chunk"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_that_misses_a_position_is_named(runtime, name, rows):
    class Kernels:
        is_capturable = False
        kv_store = staticmethod(reference.kv_store)

        def paged_attention(self, q, k_cache, v_cache, tables, size, ids, positions, scale, out, *, num_single):
            positions = positions.clone()
            positions[rows] -= 1
            reference.paged_attention(q, k_cache, v_cache, tables, size, ids, positions, scale, out)

    with pytest.raises(KernelFaultError, match="attention"):
        check(device_of(runtime), LAYOUTS[name], attention=GpuAttention(Kernels()))


def test_a_model_with_a_wrong_kernel_is_not_loaded(make_case, runtime):
    from tests.models.variants import VARIANTS

    from proa.models import load_model
    from proa.weights.checkpoint import Checkpoint

    path = make_case(next(v for v in VARIANTS if v.name == "qwen3")).path
    with pytest.raises(KernelFaultError, match="norm"):
        load_model(
            Checkpoint.open(path),
            runtime,
            max_tokens=8,
            max_positions=64,
            device=device_of(runtime, rms_norm=almost_norm),
            attention="torch",
        )
