"""What goes where with a trunk on a GPU, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from proa.core.errors import ConfigError
from proa.device.select import Gpu, choose_gpu
from proa.engine.config import EngineConfig
from proa.engine.gpu_plan import check_expert_memory, plan_gpu
from proa.engine.kv_plan import KVPlan
from proa.kvcache.layout import KVLayout
from proa.models import ExpertInfo, GpuBytes, ModelInfo

GIB = 2**30
# 4 layers x (8 heads x (128 + 128)) of bf16: 16 KiB per token.
MODEL = ModelInfo(
    family="test",
    layout=KVLayout(num_layers=4, num_kv_heads=8, key_dim=128, value_dim=128),
    vocab_size=2**16,
    max_position_embeddings=32768,
    eos_token_ids=(2,),
    has_float32_trunk=False,
    experts=ExpertInfo(layers=3, experts=8, top_k=2, hidden=256, intermediate=128),
)


def plan(free_gib: float, *, weights_gib: float = 10.0, **config: Any) -> tuple[KVPlan, dict[str, str]]:
    settings = EngineConfig(model_path="", to_engine="", from_engine="", **config)
    gpu = Gpu(0, "GPU", int(free_gib * GIB), 24 * GIB)
    return plan_gpu(settings, gpu, MODEL, GpuBytes(int(weights_gib * GIB), GIB // 2))


def test_a_cache_of_what_is_left_in_bfloat16() -> None:
    result, notes = plan(14, max_running_requests=64)
    # 14 - 10 weights - 0.5 scratch - 64 rows of logits of 20 bytes - 1 reserve, 95 % of it.
    room = 2.5 * GIB - 64 * 2**16 * 20
    assert result.num_tokens == int(room * 0.95) // (16384 * 16) * 16
    assert result.dtype == "bfloat16"
    assert notes["device"] == "GPU (cuda:0)"
    assert notes["gpu_memory"].startswith("trunk 10.00, KV cache 2.30, scratch 0.58, reserve 1.00 of 14.00 GiB free")


def test_float32_weights_get_a_float32_cache() -> None:
    settings = EngineConfig(model_path="", to_engine="", from_engine="")
    model = dataclasses.replace(MODEL, has_float32_trunk=True)
    assert plan_gpu(settings, Gpu(0, "GPU", 20 * GIB, 24 * GIB), model, GpuBytes(0, 0))[0].dtype == "float32"
    assert plan(20, kv_cache_dtype="float32")[0].dtype == "float32"


def test_mem_fraction_static_bounds_weights_and_cache_together() -> None:
    result, _ = plan(23, max_running_requests=64, mem_fraction_static=0.5)
    assert result.num_tokens == int((12 - 10) * GIB * 0.95) // (16384 * 16) * 16


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"\[GPU memory\] expected room .*8\.00 GiB available, 10\.5\d GiB weights"):
        plan(8)
    with pytest.raises(ConfigError, match=r"\[max_total_tokens\] expected 16 to \d+ tokens"):
        plan(14, max_total_tokens=10**6)
    with pytest.raises(ConfigError, match=r"9\.00 GiB for the routed experts, reserve included, got 8\.50 GiB"):
        check_expert_memory(8 * GIB, int(8.5 * GIB))
    check_expert_memory(8 * GIB, 9 * GIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_gpu("cpu") is None
    with caplog.at_level(logging.INFO, logger="proa.device"):
        assert choose_gpu("auto") is None
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the trunk runs on the CPU"]
    with pytest.raises(ConfigError, match=r"\[device\] expected a CUDA GPU .*Fix: use --device cpu"):
        choose_gpu("cuda")
